"""Writes fixtures/tokenizer: pieces of pre-tokenizers, a SentencePiece vocabulary, ids of real models.

    text_ids.py --fixtures F --weights CACHE

- `pre_tokenizers.json`: the pieces of each text by Hugging Face `tokenizers`' own pre-tokenizers.
- `sentence_piece.json`: a vocabulary that Google's `sentencepiece` trained on the licence, with its ids.
- `real_smollm2.json`, `real_gemma3.json`: ids over the vocabularies in the real models' files, by
  `tokenizers` and by `sentencepiece`. `harness/weights/fetch.py` fills CACHE.

Needs `gguf`, `numpy`, `protobuf`, `sentencepiece` and `tokenizers`.
"""

import argparse
import io
import json
import pathlib

import gguf
import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2 as pb
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

LICENSE = pathlib.Path(__file__).parents[2] / "LICENSE"
TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n\n",
    "\t\tif x:\r\n\t\t\treturn  1\n",
    "Hello world! 123",
    "3.14159 and 1,234,567 or 2026-11-26 0x1F",
    "one 2 two  3 three   45",
    "a  b   c    d",
    "trailing   ",
    "   7",
    " \n 7 \n\n x",
    "I'm you're HE'S THEY'LL don't 'tis rock'n'roll",
    "Café déjà vu. Straße, naïve coöperation",
    "e\u0301 combining, o\u0308",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01 \u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043a\u0430\u043a \u0434\u0435\u043b\u0430?",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0643",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea ok",
    "\u00bd \u2167 \u0663\u0664 x\u00b2",
    "fn main() { println!(\"{}\", a[0] != b->c); } // done",
    "https://example.com/a_b?c=d&e=%20#f",
    "<b>bold</b> <|im_start|>user <bos> [INST]",
    "\u2581already\u2581escaped",
    "zero\u200bwidth\u00a0nbsp\u3000wide",
    "line one\nline two\n\n\nline five\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "ALLCAPS MixedCase snake_case kebab-case",
    "\ufeffbom \ufffd replacement",
    "x" * 50 + " " * 40 + "\n" * 40 + "\t" * 10 + "y",
]
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SMOLLM = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])
PRE = {
    "gpt-2": GPT2,
    "smollm": SMOLLM,
    "llama-bpe": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


def bytes_of_letters():
    letters = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in letters]
    table = {chr(b): b for b in letters}
    return table | {chr(0x100 + i): b for i, b in enumerate(rest)}


def pieces(pre, text):
    table = bytes_of_letters()
    found = [bytes(table[c] for c in piece) for piece, _ in pre.pre_tokenize_str(text)]
    return [piece.decode() for piece in found]


def fields(path):
    read = gguf.GGUFReader(path).fields
    return lambda key: read["tokenizer.ggml." + key].contents()


def smollm2(path):
    field = fields(path)
    tokens, kinds = field("tokens"), field("token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in field("merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = SMOLLM
    special = [AddedToken(t, normalized=False, special=True) for t, k in zip(tokens, kinds) if k == 3]
    tokenizer.add_special_tokens(special)
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def processor(tokens, scores, kinds, prefix):
    """Google's implementation over a vocabulary; GGUF's kinds are its own types."""
    model = pb.ModelProto()
    model.trainer_spec.model_type = pb.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = 6 in kinds
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = prefix
    model.normalizer_spec.remove_extra_whitespaces = False
    for i, (token, score, kind) in enumerate(zip(tokens, scores, kinds)):
        if kind == 4:
            token = token.replace(" ", "\u2581")
        model.pieces.add(piece=token, score=score, type=kind)
        if token in ("<bos>", "<s>"):
            model.trainer_spec.bos_id = i
        if token in ("<eos>", "</s>"):
            model.trainer_spec.eos_id = i
        if token == "<unk>":
            model.pieces[i].type = pb.ModelProto.SentencePiece.UNKNOWN
            model.trainer_spec.unk_id = i
    return spm.SentencePieceProcessor(model_proto=model.SerializeToString())


def small_vocabulary():
    out = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(LICENSE.read_text().splitlines()),
        model_writer=out,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["\n", "\n\n", "<table>"],
        minloglevel=2,
    )
    model = pb.ModelProto.FromString(out.getvalue())
    kinds = [piece.type for piece in model.pieces]
    # The converter writes user-defined blanks as they are.
    tokens = [p.piece.replace("\u2581", " ") if p.type == 4 else p.piece for p in model.pieces]
    scores = [piece.score for piece in model.pieces]
    cases = []
    for prefix in [False, True]:
        encode = processor(tokens, scores, kinds, prefix).encode
        # A text that special symbols cut has a prefix in each part here, and one in all there.
        texts = [t for t in TEXTS if not prefix or not ("\n" in t or "<table>" in t)]
        cases += [dict(prefix=prefix, text=text, ids=encode(text)) for text in texts]
    return dict(tokens=tokens, scores=scores, kinds=kinds, cases=cases)


def write(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(path.name, path.stat().st_size)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixtures", type=pathlib.Path, required=True)
    parser.add_argument("--weights", type=pathlib.Path, required=True)
    arg = parser.parse_args()
    folder = arg.fixtures / "tokenizer"
    by_pre = {name: [dict(text=t, pieces=pieces(pre, t)) for t in TEXTS if t] for name, pre in PRE.items()}
    write(folder / "pre_tokenizers.json", by_pre)
    write(folder / "sentence_piece.json", small_vocabulary())
    encode = smollm2(arg.weights / "SmolLM2-135M-Instruct.Q4_1.gguf")
    # Only the lines' ids, as the tokens of control strings are another matter.
    write(folder / "real_smollm2.json", [dict(text=text, ids=encode(text)) for text in TEXTS])
    field = fields(arg.weights / "gemma-3-270m-q4_k_m.gguf")
    encode = processor(field("tokens"), field("scores"), field("token_type"), False).encode
    write(folder / "real_gemma3.json", [dict(text=text, ids=encode(text)) for text in TEXTS])


if __name__ == "__main__":
    main()
