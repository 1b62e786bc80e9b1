"""Writes fixtures/tokenizer: reduced vocabularies and token ids from Hugging Face `tokenizers`."""

import argparse
import json
import pathlib
import random

import tiny_models
import tiny_tokenizer

REDUCED = 6144
RANDOM_TEXTS, RANDOM_IDS = 120, 60

TEXTS = {
    "empty": "",
    "one space": " ",
    "plain": "Hello world, how are you?",
    "contractions": "I've it's we'll they're I'm you'd don't can't o'clock 'tis",
    "contractions in capitals": "I'VE IT'S WE'LL THEY'RE I'M YOU'D DON'T 'Ll 'Re",
    "contraction with a long s": "'\u017f 'lL '\u2019s x\u2019s",
    "contraction before letters": "'server 'till 'random 'milk 'dog 'veil 'llama",
    "digits": "3 33 333 1234567890 3.14159 1e-7 ٣٤٥ Ⅷ ½ ²³",
    "digits beside letters": "abc123def 4x4 utf8 H2O 10km",
    "accents composed": "résumé naïve Ångström Việt Nam",
    "accents decomposed": "re\u0301sume\u0301 nai\u0308ve A\u030angstro\u0308m Vie\u0323\u0302t",
    "marks in another order": "e\u0302\u0323 e\u0323\u0302 \u1ec7 q\u0307\u0323 q\u0323\u0307",
    "mark alone": "\u0301 \u0301a a \u0301",
    "hangul jamo": "\u1112\u1161\u11ab 한 \uac00\u11a8",
    "compatibility forms": "ﬁ ① ㎏ ｆｕｌｌ Å \u212b \u2126 \u1e9b\u0323",
    "Chinese": "我想在apple工作1314151天～。你好，世界！",
    "Japanese": "こんにちは、カタカナと漢字。か\u3099 が",
    "Korean": "안녕하세요 세계",
    "Devanagari": "नमस्ते दुनिया क्षत्रिय हिन्दी",
    "Thai": "สวัสดีชาวโลก ก็",
    "Arabic": "مرحبا بالعالم مُحَمَّد",
    "Hebrew": "שָׁלוֹם עולם",
    "Khmer": "កាន់តែពិសេសអាចខលចេញ",
    "Cyrillic": "нещо на Български",
    "Tamil": "வணக்கம் உலகம்",
    "mathematical letters": "𝔘𝔫𝔦 𝒞ode ℝ²",
    "emoji": "😀😶‍🌫️ 👩‍👩‍👧‍👦 👍🏽 🇨🇭 ✅ 🦙🦙 1️⃣",
    "blank runs": "a  b   c    d\t\te \t f",
    "blanks at the ends": "   lead and trail   ",
    "odd blanks": "a\u00a0b\u2003c\u3000d\u200be\u0085f\u2028g\ufeffh",
    "newline runs": "a\n\nb\n\n\nc\r\n\r\nd\re\n \n  \n\tf\n",
    "only newlines": "\n\n\n",
    "blanks then newline": "x   \n   y  \n\n  z",
    "punctuation": "!!!??? ... --- === ``` \"\"\" '''' (a) [b] {c} <d> </e> a/b\\c #!/usr %$€£",
    "punctuation then newline": "end.\n\nNext!\r\n?!\n",
    "code": "fn main() {\n    let x = vec![1, 2];\n\tprintln!(\"{x:?}\");\n}\n",
    "JSON": "{\"k\": [1.5e-3, null, true], \"é\": \"\\u00e9\"}\n",
    "URL": "https://example.org/a?b=c&d=%20#e",
    "underscores": "snake_case __init__ CamelCase kebab-case",
    "control characters": "a\u0000b\u0001\u001f\u007f",
    "private and unassigned": "\ue000 \U000f0000 \u0378",
    "last code point": "\U0010ffff\ufffd",
    "chat": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "tool call": "<tool_call>\n<function=f>\n</function>\n</tool_call>",
    "control strings close together": "<|im_end|><|im_end|> <|endoftext|>x<|fim_pad|>",
    "control string broken": "<|im_start |> <|im_end| > <|im_sta rt|> < think> <Think>",
    "control string inside a word": "pre<|im_end|>post<think>in</think>",
    "overlapping control strings": "<|im_<|im_start|>start|> <<think>>",
    "blanks around control strings": "  <|im_start|>  \n <|im_end|> \n",
    "decomposed around control strings": "e\u0301<|im_end|>\u0301 <think>\u0301",
    "long word": "a" * 300,
    "long digits": "7" * 120,
    "long blanks": " " * 200 + "x",
    "repeated pair": "ab" * 150,
    "long emoji": "🦙" * 40,
}
POOLS = [
    "abcdefgh",
    "AEIOU",
    "'s't're've'm'll'd",
    "0123456789",
    " \u00a0\u3000",
    "\n\r\t",
    "éàüñç",
    "e\u0301a\u0308\u0323",
    "的一是不我天",
    "かがさ\u3099",
    "नमस्ते",
    "กำ็้",
    "مُحَ",
    "😀👍🏽\u200d🌫\ufe0f",
    ".,!?;:-_(){}<>|/\\\"`",
    "½Ⅷ²٣",
    "\u200b\ufeff\u0085",
]


def random_texts(rng):
    """Short strings from mixed character classes, where regex engines may differ."""
    for i in range(RANDOM_TEXTS):
        parts = []
        for _ in range(rng.randint(2, 12)):
            pool = rng.choice(POOLS)
            parts.append("".join(rng.choice(pool) for _ in range(rng.randint(1, 5))))
        yield f"random {i}", "".join(parts)


def lines(rows):
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n"


class ReferenceTokenizer:
    """One vocabulary in three modes: with NFC, without NFC, and without matching special tokens."""

    def __init__(self, table):
        self.table = table
        self.usual = tiny_tokenizer.hugging_face(table)
        self.raw = tiny_tokenizer.hugging_face(table, nfc=False)
        self.plain = tiny_tokenizer.hugging_face(table, match_special=False)

    def row(self, name, text):
        encode = lambda tok: tok.encode(text, add_special_tokens=False).ids
        ids = encode(self.usual)
        return {
            "name": name,
            "text": text,
            "ids": ids,
            "ids_without_nfc": encode(self.raw),
            "ids_without_special": encode(self.plain),
            "decoded": self.usual.decode(ids, skip_special_tokens=False),
        }

    def decodings(self, rng):
        """Decodings of random ids, most of them not valid UTF-8 at token boundaries."""
        for i in range(RANDOM_IDS):
            top = 256 if i % 2 else len(self.table["tokens"])
            ids = [rng.randrange(top) for _ in range(rng.randint(1, 24))]
            yield {
                "ids": ids,
                "text": self.usual.decode(ids, skip_special_tokens=False),
                "text_without_control": self.usual.decode(ids, skip_special_tokens=True),
            }


def published_vectors(folder, pre):
    """llama.cpp's own test texts and ids for a vocabulary."""
    base = pathlib.Path(folder) / f"ggml-vocab-{pre}.gguf"
    texts = pathlib.Path(f"{base}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    out = [[int(i) for i in line.split()] for line in pathlib.Path(f"{base}.out").read_text().split("\n")]
    texts = texts[:-1] if texts[-1] == "" else texts
    return list(zip(texts, out[: len(texts)], strict=True))


def main():
    arg = argparse.ArgumentParser(description=__doc__)
    arg.add_argument("--llama", required=True, help="llama.cpp source tree")
    arg.add_argument("--out", required=True, type=pathlib.Path, help="fixtures/tokenizer")
    arg = arg.parse_args()
    folder = f"{arg.llama}/models"
    for pre in ("qwen35", "qwen2"):
        published = published_vectors(folder, pre)
        own = list(TEXTS.items())
        rng = random.Random(35)
        own += list(random_texts(rng))
        vocabulary = f"{folder}/ggml-vocab-{pre}.gguf"
        table = tiny_tokenizer.reduced(vocabulary, REDUCED, pre)
        (arg.out / f"reduced_{pre}.json").write_text(json.dumps(table, ensure_ascii=False) + "\n")
        tokenizer = ReferenceTokenizer(table)
        rows = [tokenizer.row(f"published {i}", text) for i, (text, _) in enumerate(published)]
        rows += [tokenizer.row(*pair) for pair in own]
        (arg.out / f"vectors_{pre}.json").write_text(lines(rows))
        (arg.out / f"decode_{pre}.json").write_text(lines(tokenizer.decodings(rng)))
        tiny = ReferenceTokenizer(tiny_tokenizer.reduced(vocabulary, tiny_models.VOCAB, pre))
        (arg.out / f"tiny_{pre}.json").write_text(lines([tiny.row(*pair) for pair in TEXTS.items()]))
        tokens, types, merges = tiny_tokenizer.published(vocabulary)
        tokenizer = ReferenceTokenizer(
            {
                "pre": pre,
                "regex": tiny_tokenizer.REGEX[pre],
                "tokens": tokens,
                "token_type": types,
                "merges": merges,
            }
        )
        rows, nfc_changes = [], 0
        for i, (text, ids) in enumerate(published):
            row = tokenizer.row(f"published {i}", text) | {"published": True}
            assert row["ids_without_nfc"] == ids, (pre, text, row, ids)
            nfc_changes += row["ids"] != ids
            rows.append(row)
        rows += [tokenizer.row(name, text) | {"published": False} for name, text in TEXTS.items()]
        (arg.out / f"full_{pre}.json").write_text(lines(rows))
        print(pre, len(published), "published vectors reproduced without NFC;", nfc_changes, "differ with it")


if __name__ == "__main__":
    main()
