"""Verifies a ledger against hashes (heads) saved elsewhere, and against signatures of heads.

The head of a ledger is the SHA-256 of its lines. A person who can write the file can rewrite all
lines with matching digests; only a head or a signature saved elsewhere detects this.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from functools import partial
from getpass import getpass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from .ledger import Ledger, LedgerCopy, today
from .ledger_file import LedgerFile

_PEM, _Format = serialization.Encoding.PEM, serialization.PublicFormat
_MADE = "make one by dpflash ledger key FILE, or openssl genpkey -algorithm ed25519"


@dataclass(frozen=True)
class Signature:
    """An Ed25519 signature of a ledger's first lines."""

    lines: int  # number of lines that are signed
    head: str  # SHA-256 of these lines
    day: str
    key: str  # the public key, in hexadecimal
    signature: str  # in hexadecimal

    @property
    def statement(self) -> bytes:
        """The bytes that are signed."""
        return f"dpflash ledger, lines {self.lines}, head {self.head}, {self.day}\n".encode()

    def is_valid(self) -> bool:
        """Return whether the owner of the key has signed the statement."""
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.key))
            key.verify(bytes.fromhex(self.signature), self.statement)
        except (ValueError, InvalidSignature):
            return False
        return True


@dataclass(frozen=True)
class Proof:
    """The result of `verify` for an unchanged ledger."""

    ledger: Ledger
    head: str
    kept: int | None  # number of lines that the passed head covers; None if no head was passed
    signatures: list[Signature]  # the valid signatures in the ledger's file of signatures
    is_alone: bool  # whether the guard is missing, which shows removed last lines


def heads(content: bytes) -> list[str]:
    """Return the heads of the first 0, 1, 2, ... lines (`head -n N FILE | sha256sum`)."""
    running = hashlib.sha256()
    found = [running.hexdigest()]
    for line in content.split(b"\n")[:-1]:
        running.update(line + b"\n")
        found.append(running.hexdigest())
    return found


def verify(
    path: str | os.PathLike[str], *, head: str | None = None, key: str | None = None
) -> Proof:
    """Check a ledger against its own digests, a head saved elsewhere, and signatures.

    Args:
        path: path of the ledger. If head or key is passed, `<path>.guard` may be missing.
        head: the ledger's head at an earlier time, saved elsewhere.
        key: a public key, see `public_key`; the ledger must have a signature of this key.

    Raises:
        ValueError: the ledger was changed or truncated, or lacks the signature.
    """
    file = LedgerFile(path)
    is_alone = not file.guard_path.exists() and (head, key) != (None, None)
    ledger = LedgerCopy(path, file.read()[0]) if is_alone else Ledger(path)
    own = heads(ledger.content())
    if head is not None and head not in own[1:]:
        raise ValueError(
            f"ledger {path}: it never had the head {head}: lines that were hashed to this head "
            "were changed, or removed at the end"
        )
    signatures = read_signatures(path)
    for number, one in enumerate(signatures, start=1):
        if not one.is_valid():
            raise ValueError(
                f"ledger {path}: signature {number} in {signatures_path(path)} is not valid for "
                "its key: the signature, the key, the day, the head or the number of lines was "
                "changed"
            )
        if not 1 <= one.lines < len(own) or own[one.lines] != one.head:
            raise ValueError(
                f"ledger {path}: signature {number} is for {one.lines} lines with the head "
                f"{one.head}, which the ledger does not have: lines were changed or removed at "
                "the end, or the signature belongs to another ledger"
            )
    if key is not None and key not in [one.key for one in signatures]:
        raise ValueError(
            f"ledger {path}: {signatures_path(path)} has no signature of the key {key}"
        )
    kept = None if head is None else own.index(head)
    return Proof(ledger, own[-1], kept, signatures, is_alone)


def sign(path: str | os.PathLike[str], private_key: Ed25519PrivateKey) -> Signature:
    """Verify a ledger, and append a signature of all its lines to its file of signatures.

    If the newest signature of this key covers all lines, it is returned, and nothing is appended.
    """
    proof = verify(path)
    if not proof.ledger.lines:
        raise ValueError(f"ledger {path} has no line yet: sign it after the first step")
    public = private_key.public_key().public_bytes_raw().hex()
    own = [one for one in proof.signatures if one.key == public]
    if own and own[-1].lines == len(proof.ledger.lines):
        return own[-1]
    one = Signature(len(proof.ledger.lines), proof.head, today(), public, "")
    values = {**asdict(one), "signature": private_key.sign(one.statement).hex()}
    with open(signatures_path(path), "a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")
    return Signature(**values)


def signatures_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a ledger's file of signatures, in the ledger's folder."""
    return Path(f"{os.path.realpath(path)}.signatures")


def read_signatures(path: str | os.PathLike[str]) -> list[Signature]:
    """Return a ledger's signatures; raise ValueError if the file of signatures is damaged."""
    where = signatures_path(path)
    if not where.exists():
        return []
    found = []
    for number, line in enumerate(where.read_bytes().splitlines(), start=1):
        try:
            one = Signature(**json.loads(line))
            names = (one.head, one.day, one.key, one.signature)
            if type(one.lines) is not int or not all(isinstance(n, str) for n in names):
                raise ValueError("expected a number of lines and four strings")
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(
                f"ledger {path}: line {number} of {where} is not a signature ({error}): the file "
                "of signatures was changed. Restore it from a copy"
            ) from error
        found.append(one)
    return found


def make_key(path: str | os.PathLike[str]) -> Path:
    """Write a new private key, which only its owner can read; return the public key's file."""
    key, beside = Ed25519PrivateKey.generate(), Path(path).with_suffix(".public.pem")
    plain = serialization.NoEncryption()
    for where in (beside, Path(path)):
        if where.exists():
            raise FileExistsError(f"{where} exists, and keys are never overwritten; pass another")
    with open(path, "xb", opener=partial(os.open, mode=0o600)) as file:
        file.write(key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, plain))
    with open(beside, "xb") as file:
        file.write(key.public_key().public_bytes(_PEM, _Format.SubjectPublicKeyInfo))
    return beside


def private_key(path: str | os.PathLike[str]) -> Ed25519PrivateKey:
    """Read a private key; ask for the passphrase if the key is encrypted."""
    content = Path(path).read_bytes()
    try:
        try:
            key = serialization.load_pem_private_key(content, None)
        except TypeError:  # encrypted
            passphrase = getpass(f"passphrase of {path}: ").encode()
            key = serialization.load_pem_private_key(content, passphrase)
    except ValueError as error:
        raise ValueError(
            f"key={str(path)!r}: the file has no private key in PEM, or the passphrase is wrong; "
            f"{_MADE}"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(f"key={str(path)!r}: not an Ed25519 key; {_MADE}")
    return key


def public_key(path: str | os.PathLike[str]) -> str:
    """Read a public key and return it in hexadecimal, like `Signature.key`."""
    try:
        key = serialization.load_pem_public_key(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(
            f"public_key={str(path)!r}: the file has no public key in PEM; pass the file that was "
            "written beside the private key"
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(f"public_key={str(path)!r}: not an Ed25519 key; {_MADE}")
    return key.public_bytes_raw().hex()
