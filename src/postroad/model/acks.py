"""Tokens that acknowledge dispatches: derived from the server's key, stored nowhere.

A token is `<key version>.<dispatch id>.<base64url of HMAC-SHA256(key, "postroad.ack", dispatch id, epoch)>`. The
version is a digest of the key, so that keys need no numbers: whoever holds several finds the one that signed. The epoch
is a part of it, so that an operator's retry makes earlier tokens void: what it sends again is acknowledged by who got
that.
"""

import hashlib
import hmac
import re
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence

from postroad.model.errors import BadAckToken, InvalidInput, Refused

KEY_CHARACTERS_MIN = 16
NO_KEY = (
    "Acknowledgements need a secret_key: give it to Postroad(secret_key=…), set POSTROAD_SECRET_KEY, "
    "or write it into postroad.toml; every process of the app needs the same."
)
_TOKEN = re.compile(r"([0-9a-f]{8})\.([0-9a-f]{32})\.([A-Za-z0-9_-]{43})", re.ASCII)


class Presented:
    """A token that somebody presents. What it says is never shown; whether it is true takes the dispatch's epoch."""

    __slots__ = ("_key", "_proof", "dispatch")

    def __init__(self, dispatch: str, proof: str, key: bytes | None) -> None:
        self.dispatch = dispatch
        self._proof = proof
        self._key = key

    def proves(self, epoch: int) -> bool:
        """Whether it was made for the dispatch in this epoch; in the same time for every wrong one."""
        expected = _proof(self._key or b"", self.dispatch, epoch)
        return hmac.compare_digest(expected, self._proof) and self._key is not None


class Keyring:
    """The server's keys: the first one signs, all of them verify.

    Raises:
        InvalidInput: A key is no text of at least 16 characters. It is not shown.
    """

    __slots__ = ("_keys", "_signing")

    def __init__(self, keys: Sequence[str] = ()) -> None:
        encoded = [_checked(key) for key in keys]
        self._keys: Mapping[str, bytes] = {_version(key): key for key in reversed(encoded)}
        self._signing = encoded[0] if encoded else None

    def token(self, dispatch: str, epoch: int) -> str:
        """The token that acknowledges a dispatch in this epoch: the same for each of its attempts.

        Raises:
            Refused: There is no key.
        """
        key = self.require()
        return f"{_version(key)}.{dispatch}.{_proof(key, dispatch, epoch)}"

    def read(self, token: object) -> Presented:
        """What a token says.

        Raises:
            BadAckToken: It is none.
            Refused: There is no key.
        """
        self.require()
        found = _TOKEN.fullmatch(token) if isinstance(token, str) else None
        if found is None:
            raise BadAckToken
        version, dispatch, proof = found.groups()
        return Presented(dispatch, proof, self._keys.get(version))

    def require(self) -> bytes:
        """The key that signs.

        Raises:
            Refused: There is no key.
        """
        if self._signing is None:
            raise Refused(NO_KEY, field="secret_key")
        return self._signing


def key_texts(given: object) -> tuple[str, ...]:
    """The keys that a program gives: one, or several of which the first one signs.

    Raises:
        InvalidInput: They are none that a Keyring takes.
    """
    keys = (given,) if isinstance(given, str) else given
    if not isinstance(keys, Sequence) or isinstance(keys, bytes) or not keys:
        raise InvalidInput("secret_key must be a text, or a sequence of them.", field="secret_key")
    Keyring(keys)
    return tuple(keys)


def _checked(key: object) -> bytes:
    if not isinstance(key, str) or len(key) < KEY_CHARACTERS_MIN:
        said = f"Each secret_key must be a text of at least {KEY_CHARACTERS_MIN} characters"
        raise InvalidInput(f"{said}, such as what `secrets.token_hex(32)` gives.", field="secret_key")
    return key.encode("utf-8", "surrogatepass")


def _version(key: bytes) -> str:
    return hashlib.sha256(b"postroad.key\0" + key).hexdigest()[:8]


def _proof(key: bytes, dispatch: str, epoch: int) -> str:
    said = f"postroad.ack\0{dispatch}\0{epoch}".encode()
    return urlsafe_b64encode(hmac.digest(key, said, "sha256")).rstrip(b"=").decode()
