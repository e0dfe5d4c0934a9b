"""A peer on a raw socket that speaks the rendezvous protocol."""

import contextlib
import hashlib
import hmac
import json

MAGIC = b"tf_redsync "


class RawPeer:
    """Speaks the rendezvous protocol as documented, with any secret."""

    def __init__(self, connection, secret, calls=True):
        self.file = connection.makefile("rwb")
        connection.settimeout(5)
        self.got = b""
        own_challenge = "0123456789abcdef" * 2
        if calls:
            self.write(json.dumps({"challenge": own_challenge}).encode())
        peer_challenge = json.loads(self.read())["challenge"]
        if not calls:
            self.write(json.dumps({"challenge": own_challenge}).encode())
        both = f"{own_challenge} {peer_challenge}" if calls else f"{peer_challenge} {own_challenge}"
        self._key = hmac.new(secret.encode(), both.encode(), hashlib.sha256).digest()
        self._direction = b"call" if calls else b"answer"
        self._count = 0

    def write(self, text):
        with contextlib.suppress(OSError):
            self.file.write(MAGIC + text + b"\n")
            self.file.flush()

    def read(self):
        """Returns the next line without its prefix, or an empty line at end of stream."""
        line = b""
        with contextlib.suppress(ConnectionResetError):
            line = self.file.readline()
        self.got += line
        return line[len(MAGIC) :]

    def send(self, **words):
        self._count += 1
        text = json.dumps(words).encode()
        signed = self._direction + b" %d " % self._count + text
        self.write(hmac.new(self._key, signed, hashlib.sha256).hexdigest().encode() + b" " + text)

    def read_until_closed(self):
        """Reads until the other side closes the connection; `got` has the text."""
        while self.read():
            pass

    def receive(self):
        return json.loads(self.read().partition(b" ")[2] or b"null")
