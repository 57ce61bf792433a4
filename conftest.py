"""The repository's own conftest: nothing but what every test here needs."""

pytest_plugins = ["pytester"]
