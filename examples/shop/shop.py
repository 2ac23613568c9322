"""An order and its e-mail in one commit."""

from sqlalchemy import create_engine, text

from postroad import Dispatch, Kind, Postroad, sqlite

engine = sqlite.configure(create_engine("sqlite:///shop.db"))
post = Postroad(engine)
MAIL = Kind("mail", dict[str, str])


@post.sender(MAIL)
def send_mail(d: Dispatch[dict[str, str]]) -> None:
    print(f"to {d.to}: {d.body['subject']} (attempt {d.attempt}, key {d.key})")


if __name__ == "__main__":
    with engine.begin() as conn:  # your transaction
        conn.execute(text("create table if not exists orders (id integer primary key)"))
        order = conn.execute(text("insert into orders default values returning id")).scalar_one()
        with post.join(conn) as tx:  # async connection: async with
            tx.send(MAIL, {"subject": "Thanks"}, to="ann@example.com", key=f"order/{order}/thanks")
    post.drain()  # sends what is due and stops; a server runs `with post.running():` instead
