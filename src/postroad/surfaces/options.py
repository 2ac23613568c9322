"""Options that several commands take."""

from typing import Annotated

import typer

DatabaseOption = Annotated[
    str | None, typer.Option("--database", help="Its URL; else POSTROAD_DATABASE_URL, DATABASE_URL, postroad.toml.")
]
SchemaOption = Annotated[str | None, typer.Option("--schema", help="The Postgres schema of our tables.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Answer with one JSON document.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="At most so many.")]
