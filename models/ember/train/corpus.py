"""Collects permissively licensed text that ships with the language toolchains.

Sources (nothing is downloaded):
  rust-src    rendered sources of core, alloc, std, proc_macro, test   MIT or Apache-2.0
  rust-docs   the books that rustup installs (Book, Reference, ...)    MIT or Apache-2.0
  python-src  the Python standard library without its tests            PSF-2.0

Writes one JSON object per line, {"source", "path", "split", "text"}, xz-compressed.
The split is decided by a hash of the path, so that a held-out file is never trained on.

Usage: python corpus.py OUT.jsonl.xz [--rust-html DIR] [--python-lib DIR]
"""
import argparse
import hashlib
import html
import html.parser
import json
import lzma
import os
import pathlib
import re
import subprocess
import sysconfig

RUST_CRATES = ("alloc", "core", "std", "proc_macro", "test", "std_detect")
RUST_BOOKS = ("book", "reference", "nomicon", "rust-by-example", "cargo", "rustc", "rustdoc",
              "edition-guide", "style-guide", "clippy")
# The Embedded Book, installed beside them, is left out: its prose is CC-BY-SA, not permissive.
# Generated tables and machine intrinsics: large, repetitive, nothing to learn for a small model.
SKIP_RUST = ("core_arch", "unicode/unicode_data", "/tables", "stdarch", "flt2dec", "dec2flt/table")
SKIP_PYTHON = ("site-packages", "/test/", "/tests/", "idlelib/idle_test", "lib2to3/tests", "pydoc_data",
               "encodings/", "turtledemo", "_sysconfigdata", "config-3", "__phello__", "ensurepip")
HELD_OUT_ONE_IN = 40
MAX_FILE_CHARS = 200_000


def split_of(path: str) -> str:
    """Train or held-out, from the path alone."""
    digest = hashlib.sha256(path.encode()).digest()
    return "heldout" if int.from_bytes(digest[:4], "little") % HELD_OUT_ONE_IN == 0 else "train"


def rust_source(page: str) -> str:
    """Plain source text of a rendered source page."""
    start = page.find('<pre class="rust">')
    if start < 0:
        return ""
    body = page[start:page.find("</code></pre>", start)]
    body = re.sub(r"<a[^>]*data-nosnippet[^>]*>\d+</a>", "", body)
    body = re.sub(r"<[^>]+>", "", body)
    return html.unescape(body)


class BookText(html.parser.HTMLParser):
    """Markdown-like text of the <main> part of a book page."""

    def __init__(self):
        super().__init__()
        self.out: list[str] = []
        self.in_main = False
        self.in_pre = False
        self.skip = 0

    def handle_starttag(self, tag, attrs):
        classes = dict(attrs).get("class") or ""
        if tag == "main":
            self.in_main = True
        elif tag in ("script", "style", "svg", "button"):
            self.skip += 1
        elif not self.in_main:
            return
        elif tag == "pre":
            self.in_pre = True
            self.out.append("\n```\n")
        elif tag == "code" and not self.in_pre:
            self.out.append("`")
        elif tag == "span" and "boring" in classes:
            pass
        elif tag in ("h1", "h2", "h3", "h4"):
            self.out.append("\n" + "#" * int(tag[1]) + " ")
        elif tag == "li":
            self.out.append("\n- ")
        elif tag in ("p", "table", "tr", "blockquote", "ul", "ol"):
            self.out.append("\n")
        elif tag in ("td", "th"):
            self.out.append(" | ")

    def handle_endtag(self, tag):
        if tag == "main":
            self.in_main = False
        elif tag in ("script", "style", "svg", "button"):
            self.skip = max(0, self.skip - 1)
        elif not self.in_main:
            return
        elif tag == "pre":
            self.in_pre = False
            self.out.append("\n```\n")
        elif tag == "code" and not self.in_pre:
            self.out.append("`")
        elif tag in ("p", "h1", "h2", "h3", "h4"):
            self.out.append("\n")

    def handle_data(self, data):
        if self.in_main and not self.skip:
            self.out.append(data if self.in_pre else re.sub(r"\s+", " ", data))


def book_text(page: str) -> str:
    parser = BookText()
    parser.feed(page)
    text = "".join(parser.out)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip()


def collect_rust(root: pathlib.Path):
    for crate in RUST_CRATES:
        for path in sorted((root / "src" / crate).rglob("*.html")):
            name = str(path.relative_to(root))[:-5]
            if any(part in name for part in SKIP_RUST):
                continue
            yield "rust-src", name, rust_source(path.read_text(encoding="utf-8", errors="replace"))
    for book in RUST_BOOKS:
        for path in sorted((root / book).rglob("*.html")):
            name = str(path.relative_to(root))
            if path.name in ("print.html", "toc.html", "404.html") or re.search(r"/[a-z]{2}(-[A-Z]{2})?/", name):
                continue
            yield "rust-docs", name, book_text(path.read_text(encoding="utf-8", errors="replace"))


def collect_python(root: pathlib.Path):
    for path in sorted(root.rglob("*.py")):
        name = str(path.relative_to(root))
        if any(part in "/" + name for part in SKIP_PYTHON):
            continue
        yield "python-src", "python/" + name, path.read_text(encoding="utf-8", errors="replace")


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("out")
    args.add_argument("--rust-html")
    args.add_argument("--python-lib", default=sysconfig.get_paths()["stdlib"])
    args = args.parse_args()
    if args.rust_html is None:
        root = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True, check=True)
        args.rust_html = os.path.join(root.stdout.strip(), "share/doc/rust/html")
    seen, totals = set(), {}
    with lzma.open(args.out, "wt", encoding="utf-8", preset=6) as out:
        for part in (collect_rust(pathlib.Path(args.rust_html)),
                     collect_python(pathlib.Path(args.python_lib))):
            for source, path, text in part:
                text = text.replace("\r\n", "\n").strip()
                digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
                if len(text) < 400 or len(text) > MAX_FILE_CHARS or digest in seen or "<|" in text:
                    continue
                seen.add(digest)
                split = split_of(path)
                out.write(json.dumps({"source": source, "path": path, "split": split, "text": text}) + "\n")
                key = (source, split)
                n, size = totals.get(key, (0, 0))
                totals[key] = (n + 1, size + len(text))
    for (source, split), (n, size) in sorted(totals.items()):
        print(f"{source:10s} {split:8s} {n:5d} files {size / 1e6:7.2f} M characters")


if __name__ == "__main__":
    main()
