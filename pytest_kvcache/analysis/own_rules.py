"""The rules of a session: ours and the user's, read before anything is measured, and kept in its folder so that its report can be made again by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_kvcache.analysis.findings import MOST_BYTES, Rule, rules_in, shipped_rules
from pytest_kvcache.errors import UsageError
from pytest_kvcache.runfolder import write_atomic
from pytest_kvcache.userfiles import read_user_text

FOLDER = "rules"
MOST_FILES = 50


@dataclass(frozen=True)
class RuleSet:
    """The rules that findings are made by, and the users' files that they came from, as name and text."""

    rules: tuple[Rule, ...]
    files: tuple[tuple[str, str], ...] = ()


def rule_set(paths: Sequence[str | Path] = ()) -> RuleSet:
    """Return the shipped rules with those of users' files; one of the same id replaces the one before. Raises UsageError: file, rule and key."""
    found = {rule.id: rule for rule in shipped_rules()}
    files: list[tuple[str, str]] = []
    for path in (Path(one).expanduser() for one in paths):
        text = read_user_text(path, "the rules", most_bytes=MOST_BYTES, hint="--kv-rules names a TOML file of [[rule]] tables; docs/diagnose.md")
        found.update({rule.id: rule for rule in rules_in(text, str(path))})
        files.append((path.name, text))
    return RuleSet(tuple(found.values()), tuple(files))


def keep_rules(session: Path, rules: RuleSet) -> None:
    """Write the users' files of rules into a session's folder. Raises CannotWrite."""
    known = {path.read_text(encoding="utf-8", errors="replace") for path in kept_rules(session)}
    for name, text in rules.files:
        if text not in known:
            number = len(known) + 1
            known.add(text)
            write_atomic(session / FOLDER / f"{number:02}-{_plain(name)}", text)


def kept_rules(session: Path) -> list[Path]:
    """Return the files of rules that a session's folder holds, in the order in which they were given."""
    folder = session / FOLDER
    return sorted(path for path in folder.glob("*.toml") if path.is_file() and not path.is_symlink()) if folder.is_dir() else []


def readable_rules(session: Path) -> tuple[list[Path], list[str]]:
    """Return the kept files that this build reads, and what is wrong with the others: a report is made without them, and says so."""
    found, wrong = [], []
    kept = kept_rules(session)
    if len(kept) > MOST_FILES:
        wrong.append(f"{FOLDER}/: {len(kept)} files, of which the first {MOST_FILES} are read")
    for path in kept[:MOST_FILES]:
        try:
            rule_set([path])
            found.append(path)
        except UsageError as error:
            wrong.append(f"{path.parent.name}/{path.name}: {error.what}")
    return found, wrong


def _plain(name: str) -> str:
    stem = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in name.removesuffix(".toml"))
    return f"{stem[:60] or 'rules'}.toml"
