"""SQL that is written once and runs on SQLite and on Postgres. Every difference of the dialects is a line here.

A statement is text with marks in braces:

    {p}                         the prefix of our tables, with the schema where there is one
    {rows:name(a text, b int)}  the rows of the JSON parameter `name` as a table; it also has `ord`, from 0
    {list:name}                 the strings of the JSON array `name`, as a table with the one column `value`
    {ints:name}                 the integers of the JSON array `name`, likewise
    {in_list:name} {in_ints:name}  "is one of" them, in a form that is always looked up one by one
    {pairs:column}              the keys and texts of a JSON object in a column, as a table (key, value)
    {json_agg}                  the aggregate that makes a JSON array
    {for_update} {skip_locked}  row locks, where there are such
    {bytewise}                  the collation of our text columns, for text that a parameter brought
    {now_rows}                  a hint that a CTE is computed once
    {match:o.id=name.id}        that a text of a table's row is the one of its rows: looked up one by one

A statement for `for_rows` has one `FROM {rows:name(...)}` and writes its columns as `name.column`: they are parameters
where there is one row, or where they are the same in every row.
"""

import re
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter, itemgetter
from types import GenericAlias
from typing import Any, Literal, TypeVar

import msgspec
from sqlalchemy import Connection, Dialect, text
from sqlalchemy.exc import DBAPIError

from postroad.store import preparing
from postroad.store.schema import PREFIX

SCHEMA_OPTION = "postroad_schema"
OURS_OPTION = "postroad_ours"
READ_OPTION = "postroad_read"
S = TypeVar("S", bound=msgspec.Struct)
# How a statement gets its rows: as objects in one JSON parameter, as one row's columns, or as these columns of many
# rows, the others being the same in all of them.
Form = Literal["objects", "one"] | tuple[str, ...]
Row = Any  # a named tuple of the columns that a statement names
SHARING_ROWS_MIN = 8  # of fewer rows all columns are written out, so that a statement has few forms
FORMS_MAX = 64  # of a statement: whatever comes after has all its columns written out
_ROWS = re.compile(r"\{rows:(\w+)\(([^)]*)\)\}")
_FROM_ROWS = re.compile(r"\bFROM \{rows:(\w+)\(([^)]*)\)\}")
_MATCH = re.compile(r"\{match:([\w.]+)=(\w+)\.(\w+)\}")
_LIST = re.compile(r"\{(list|ints|in_list|in_ints|pairs):([\w.]+)\}")
_LIMIT = re.compile(r"\bLIMIT :(\w+)")


class Found:
    """What a statement found, read to its end at once, so that no cursor stays open; and how many rows it wrote."""

    __slots__ = ("_columns", "_rows", "rowcount")

    def __init__(self, columns: tuple[str, ...], rows: Sequence[Any], rowcount: int) -> None:
        self._columns = columns
        self._rows = rows
        self.rowcount = rowcount

    def __iter__(self) -> Iterator[Any]:
        return iter(self.all())

    def all(self) -> list[Any]:
        """The rows, with their columns as attributes."""
        return list(map(_row_of(self._columns), self._rows))

    def one_or_none(self) -> Any:
        """The one row there may be."""
        return _one(self.all()) if self._rows else None

    def one(self) -> Any:
        """The one row."""
        return _one(self.all())

    def mappings(self) -> list[dict[str, Any]]:
        """The rows as dictionaries by column."""
        return [dict(zip(self._columns, row, strict=True)) for row in self._rows]

    def into(self, form: type[S]) -> list[S]:
        """The rows as structs, whose fields are their columns: in the same order where these are `array_like`.

        That takes an eighth of the time.
        """
        if not form.__struct_config__.array_like:
            return [msgspec.convert(row, form) for row in self.mappings()]
        assert self._columns == form.__struct_fields__[: len(self._columns)], (self._columns, form)
        found: list[S] = msgspec.convert(list(map(tuple, self._rows)), _list_of(form))
        return found

    def scalars(self) -> list[Any]:
        """The first column."""
        return [row[0] for row in self._rows]

    def scalar_one_or_none(self) -> Any:
        """The first column of the one row there may be."""
        return _one(self.scalars()) if self._rows else None

    def scalar_one(self) -> Any:
        """The first column of the one row."""
        return _one(self.scalars())


def _one(found: list[Any]) -> Any:
    (one,) = found
    return one


@cache
def _list_of(form: type[S]) -> Any:
    return GenericAlias(list, (form,))


@cache
def _row_of(columns: tuple[str, ...]) -> Callable[[Any], Any]:
    named: Any = namedtuple
    made: Callable[[Any], Any] = named("Row", columns, rename=True)._make
    return made


class Statement:
    """A statement, built once per dialect and schema. Call it with a connection and its parameters."""

    __slots__ = ("_built", "_columns", "_sql")

    def __init__(self, sql: str) -> None:
        self._sql = sql
        self._columns = _row_columns(sql)
        self._built: dict[tuple[str, str | None], dict[Form, _Built]] = {}

    def __call__(self, conn: Connection, **parameters: Any) -> Found:
        return self._for(conn, "objects")(conn, parameters)

    def for_rows(self, conn: Connection, rows: Sequence[Any], **parameters: Any) -> Found:
        """Call it for rows, at least one, all structs or all mappings.

        Of one row each column is a parameter: on Postgres unfolding JSON takes 0.1 ms, however little it is. Of many
        only those columns are JSON in which they differ: Postgres takes a list for each of these, SQLite one of all.
        """
        if len(rows) == 1:
            return self._for(conn, "one")(conn, {**msgspec.to_builtins(rows[0]), **parameters})
        pick: Any = itemgetter if isinstance(rows[0], Mapping) else attrgetter
        values = {column: list(map(pick(column), rows)) for column in self._columns}
        varying = _varying(values) if len(self._forms(conn)) < FORMS_MAX else self._columns
        shared = msgspec.to_builtins({column: each[0] for column, each in values.items() if column not in varying})
        if conn.dialect.name == "postgresql" or len(varying) == 1:
            lists = {_list_name(column): as_json(values[column]) for column in varying}
        else:
            lists = {_list_name("rows"): as_json(list(zip(*(values[column] for column in varying), strict=True)))}
        return self._for(conn, varying)(conn, {**shared, **lists, **parameters})

    def _for(self, conn: Connection, form: Form) -> "_Built":
        forms = self._forms(conn)
        built = forms.get(form)
        if built is None:
            schema = conn.get_execution_options().get(SCHEMA_OPTION)
            built = forms[form] = _Built(render(self._sql, conn.dialect.name, schema, form), conn.dialect)
        return built

    def _forms(self, conn: Connection) -> "dict[Form, _Built]":
        """What was built for this dialect and schema."""
        key = (conn.dialect.name, conn.get_execution_options().get(SCHEMA_OPTION))
        forms = self._built.get(key)
        if forms is None:
            forms = self._built[key] = {}
        return forms


def _row_columns(sql: str) -> tuple[str, ...]:
    """The columns of the rows that a statement for `for_rows` takes."""
    found = _FROM_ROWS.search(sql)
    return () if found is None else tuple(column for column, _ in _columns(found[2]))


def _varying(values: Mapping[str, list[Any]]) -> tuple[str, ...]:
    """The columns in which these rows differ; at least one, since there is something to unfold."""
    columns = tuple(values)
    if len(values[columns[0]]) < SHARING_ROWS_MIN:
        return columns
    return tuple(c for c, each in values.items() if each.count(each[0]) < len(each)) or columns[:1]


def _list_name(column: str) -> str:
    """The parameter with a column of many rows."""
    return f"{column}_list"


class _Built:
    """A statement for one dialect and schema. Call it with a connection and its parameters.

    On connections of our own engine it goes to the driver's cursor directly: SQLAlchemy's own way costs ten times
    what SQLite takes to carry it out. Where there are event hooks, and on the user's connections, whatever driver is
    beneath, it goes that way.
    """

    __slots__ = ("_clause", "_columns", "_names", "_sql")

    def __init__(self, sql: str, dialect: Dialect) -> None:
        self._clause = text(sql)
        compiled: Any = self._clause.compile(dialect=dialect)
        self._sql = str(compiled)
        self._names: list[str] | None = compiled.positiontup
        self._columns: tuple[str, ...] | None = None  # not known yet; none: there are no rows

    def __call__(self, conn: Connection, parameters: dict[str, Any]) -> Found:
        options = conn.get_execution_options()
        if options.get(OURS_OPTION) and not conn.dispatch.before_cursor_execute:
            return self._directly(conn, parameters, reads=READ_OPTION in options)
        return self._through(conn, parameters)

    def _through(self, conn: Connection, parameters: dict[str, Any]) -> Found:
        result = conn.execute(self._clause, parameters)
        if not result.returns_rows:
            return Found((), (), result.rowcount)
        return Found(tuple(result.keys()), result.all(), result.rowcount)

    def _directly(self, conn: Connection, parameters: dict[str, Any], *, reads: bool) -> Found:
        if not conn.in_transaction():
            conn.begin()  # as SQLAlchemy does by itself
        cursor: Any = conn.connection.cursor()
        try:
            if self._names is None:
                cursor.execute(self._sql, parameters, prepare=False if reads else None)
            else:
                cursor.execute(self._sql, [parameters[name] for name in self._names])
            columns = self._columns
            if columns is None:
                columns = self._columns = tuple([column[0] for column in cursor.description or ()])
            return Found(columns, cursor.fetchall() if columns else (), cursor.rowcount)
        except conn.dialect.loaded_dbapi.Error as error:
            raise refusal(conn, self._sql, error) from error
        finally:
            cursor.close()


def refusal(conn: Connection, sql: str, error: Exception) -> BaseException:
    """The driver's error as SQLAlchemy tells it. A connection that is lost is found out by SQLAlchemy itself."""
    dialect: Any = conn.dialect
    preparing.give_up(conn, error)
    if dialect.is_disconnect(error, conn.connection.dbapi_connection, None):
        conn.exec_driver_sql("SELECT 1")
    return refusal_of(dialect, sql, error)


def refusal_of(dialect: Any, sql: str | None, error: Exception) -> BaseException:
    """The driver's error as SQLAlchemy tells it; no parameters are shown."""
    return DBAPIError.instance(sql, None, error, dialect.loaded_dbapi.Error, hide_parameters=True, dialect=dialect)


def as_json(value: object) -> str:
    """The JSON text of a statement's `rows`, `list` or `ints` parameter: a sequence of mappings, structs or scalars."""
    return msgspec.json.encode(value).decode()


def render(sql: str, dialect: str, schema: str | None, form: Form = "objects") -> str:
    """The statement's text for one dialect and schema."""
    is_postgres = dialect == "postgresql"
    marks = _POSTGRES if is_postgres else _SQLITE
    prefix = f'"{schema}".{PREFIX}' if schema else PREFIX
    if form == "one":
        sql = _of_one(sql, marks)
    elif form != "objects":
        sql = _of_many(sql, marks, form, is_postgres=is_postgres)
    rows = _postgres_rows if is_postgres else _sqlite_rows
    sql = _ROWS.sub(lambda m: rows(m[1], _columns(m[2])), sql)
    sql = _LIST.sub(lambda m: marks[m[1]].format(name=m[2]), sql)
    for mark in ("json_agg", "for_update", "skip_locked", "bytewise", "now_rows"):
        sql = sql.replace("{" + mark + "}", marks[mark])
    if not is_postgres:
        # SQLite (3.53; 3.40 did not yet) plans by the value of a LIMIT that is a parameter by itself, and compiles the
        # statement anew whenever one is bound, which takes four to ten times what it takes to run.
        sql = _LIMIT.sub(r"LIMIT CAST(:\1 AS integer)", sql)
    return sql.replace("{p}", prefix)


def _of_one(sql: str, marks: Mapping[str, str]) -> str:
    """The statement with a parameter in the place of each column of its rows, and without these and their order."""
    (name, columns) = _FROM_ROWS.findall(sql)[0]
    sql = re.sub(rf"ORDER BY {name}\.\w+(, {name}\.\w+)*", "", _FROM_ROWS.sub("", sql))
    return _with_parameters(_MATCH.sub(r"\1 = \2.\3", sql), name, _columns(columns), marks)


def _of_many(sql: str, marks: Mapping[str, str], varying: tuple[str, ...], *, is_postgres: bool) -> str:
    """The statement with the columns in which its rows differ in lists, and a parameter in the place of each other."""
    (name, listed) = _FROM_ROWS.findall(sql)[0]
    columns = _columns(listed)
    match = _MATCH.search(sql)
    if match is not None and varying == (match[3],):
        sql = _MATCH.sub(rf"\1 {{in_list:{_list_name(match[3])}}}", _FROM_ROWS.sub("", sql))
    else:
        # On Postgres the join alone would be planned as a walk over the table where the planner takes it for empty.
        among = rf" AND \1 {{in_list:{_list_name(match[3])}}}" if match is not None and is_postgres else ""
        sql = _MATCH.sub(rf"\1 = \2.\3{among}", sql)
    sql = _with_parameters(sql, name, [column for column in columns if column[0] not in varying], marks)
    unfold = _postgres_lists if is_postgres else _sqlite_lists
    return _ROWS.sub(lambda m: unfold(m[1], [column for column in columns if column[0] in varying]), sql)


def _with_parameters(sql: str, name: str, columns: list[list[str]], marks: Mapping[str, str]) -> str:
    for column, kind in columns:
        sql = re.sub(rf"\b{name}\.{column}\b", marks[kind].format(name=column), sql)
    return sql


_POSTGRES: Mapping[str, str] = {
    "list": '(SELECT value COLLATE "C" AS value FROM json_array_elements_text(CAST(:{name} AS json))) AS {name}',
    "ints": "(SELECT CAST(value AS bigint) AS value FROM json_array_elements_text(CAST(:{name} AS json))) AS {name}",
    "in_list": '= ANY(ARRAY(SELECT value COLLATE "C" FROM json_array_elements_text(CAST(:{name} AS json))))',
    "in_ints": "= ANY(ARRAY(SELECT CAST(value AS bigint) FROM json_array_elements_text(CAST(:{name} AS json))))",
    "pairs": "json_each_text(CAST({name} AS json))",
    "text": 'CAST(:{name} AS text) COLLATE "C"',
    "int": "CAST(:{name} AS bigint)",
    "json_agg": "json_agg",
    "for_update": "FOR UPDATE",
    "skip_locked": "FOR UPDATE SKIP LOCKED",
    "bytewise": 'COLLATE "C"',
    "now_rows": "MATERIALIZED",
}
_SQLITE: Mapping[str, str] = {
    "list": "(SELECT value FROM json_each(:{name})) AS {name}",
    "ints": "(SELECT value FROM json_each(:{name})) AS {name}",
    "in_list": "IN (SELECT value FROM json_each(:{name}))",
    "in_ints": "IN (SELECT value FROM json_each(:{name}))",
    "pairs": "json_each({name})",
    "text": ":{name}",
    "int": ":{name}",
    "json_agg": "json_group_array",
    "for_update": "",
    "skip_locked": "",
    "bytewise": "",
    "now_rows": "MATERIALIZED",
}


def _columns(listed: str) -> list[list[str]]:
    """Name and type of each."""
    return [column.split() for column in listed.split(",")]


def _postgres_rows(name: str, columns: list[list[str]]) -> str:
    types = {"int": "bigint", "text": 'text COLLATE "C"'}
    record = ", ".join(f"{column} {types[kind]}" for column, kind in columns)
    unfold = f"json_to_recordset(CAST(:{name} AS json)) AS ({record})"
    return _postgres_unfolded(name, columns, unfold, dict.fromkeys(types, "{0}"))


def _postgres_lists(name: str, columns: list[list[str]]) -> str:
    types = {"int": "CAST({0} AS bigint)", "text": '{0} COLLATE "C"'}
    lists = ", ".join(f"json_array_elements_text(CAST(:{_list_name(column)} AS json))" for column, _ in columns)
    return _postgres_unfolded(name, columns, lists, types)


def _postgres_unfolded(name: str, columns: list[list[str]], functions: str, types: Mapping[str, str]) -> str:
    """What these functions give as a table, each column as its type is got out of it, with the rows' order."""
    picked = ", ".join(f"{types[kind].format(column)} AS {column}" for column, kind in columns)
    names = ", ".join(column for column, _ in columns)
    return (
        f"(SELECT {picked}, ord - 1 AS ord FROM ROWS FROM ({functions}) WITH ORDINALITY "
        f"AS {name}_rows({names}, ord)) AS {name}"
    )


def _sqlite_rows(name: str, columns: list[list[str]]) -> str:
    picked = ", ".join(f"json_extract(value, '$.{column}') AS {column}" for column, _ in columns)
    return f"(SELECT {picked}, key AS ord FROM json_each(:{name})) AS {name}"


def _sqlite_lists(name: str, columns: list[list[str]]) -> str:
    if len(columns) == 1:
        (column, _) = columns[0]
        return f"(SELECT value AS {column}, key AS ord FROM json_each(:{_list_name(column)})) AS {name}"
    picked = ", ".join(f"json_extract(value, '$[{place}]') AS {c}" for place, (c, _) in enumerate(columns))
    return f"(SELECT {picked}, key AS ord FROM json_each(:{_list_name('rows')})) AS {name}"
