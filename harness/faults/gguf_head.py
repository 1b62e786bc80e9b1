"""The head of a GGUF file: where its metadata lies, and the file with one text replaced."""

import struct

STRING, ARRAY = 8, 9
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
ALIGNMENT = 32


class Head:
    """Positions in the bytes of a file."""

    def __init__(self, data):
        self.data = data
        n_tensors, n_pairs = struct.unpack_from("<QQ", data, 8)
        at = 24
        # By key: where the pair begins, where its value begins, and where it ends.
        self.pairs = {}
        for _ in range(n_pairs):
            begin = at
            key, at = self.text(at)
            value = at
            kind = struct.unpack_from("<I", data, at)[0]
            at = self.skip(kind, at + 4)
            self.pairs[key.decode()] = (begin, value, at)
        self.pairs_end = at
        for _ in range(n_tensors):
            _, at = self.text(at)
            n_dims = struct.unpack_from("<I", data, at)[0]
            at += 4 + 8 * n_dims + 4 + 8
        self.end = at
        self.data_begin = -(-at // ALIGNMENT) * ALIGNMENT

    def text(self, at):
        length = struct.unpack_from("<Q", self.data, at)[0]
        return self.data[at + 8 : at + 8 + length], at + 8 + length

    def skip(self, kind, at):
        if kind == STRING:
            return self.text(at)[1]
        if kind != ARRAY:
            return at + SIZES[kind]
        kind, length = struct.unpack_from("<IQ", self.data, at)
        at += 12
        if kind in SIZES:
            return at + SIZES[kind] * length
        for _ in range(length):
            at = self.skip(kind, at)
        return at

    def with_text(self, key, text):
        """The file with this text at `key`."""
        _, value, end = self.pairs[key]
        text = text.encode("utf-8", "replace")
        head = self.data[:value] + struct.pack("<IQ", STRING, len(text)) + text + self.data[end : self.end]
        return head + bytes(-len(head) % ALIGNMENT) + self.data[self.data_begin :]

    def places(self, prefix):
        """The ranges of the pairs whose keys begin so."""
        return [(begin, end) for key, (begin, _, end) in self.pairs.items() if key.startswith(prefix)]
