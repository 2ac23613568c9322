"""The steps of the ladder. A released step is never changed: what it should have been is another step."""

from importlib import resources

import msgspec


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step up. `oldest_code`: the oldest code, by the schema it was written for, that may run after it.

    Its SQL, one text per dialect, lies here as `<version>_<name>.<dialect>.sql`: statements that
    end with a semicolon at a line's end, with the mark `{p}` before each table's name.
    """

    version: int
    name: str
    oldest_code: int

    @property
    def title(self) -> str:
        """The step's name with its number, as operators see it."""
        return f"{self.version:04}_{self.name}"

    def statements(self, dialect: str) -> list[str]:
        """The step's statements for `sqlite` or `postgresql`."""
        text = resources.files(__package__).joinpath(f"{self.title}.{dialect}.sql").read_text("utf-8")
        return [statement.strip() for statement in text.split(";\n") if statement.strip()]


STEPS = (Step(version=1, name="tables", oldest_code=1),)
