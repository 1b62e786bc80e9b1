"""Runs llama.cpp's converter on a tiny checkpoint, whose tokenizer is not in the converter's hash table.

convert_tiny.py LLAMA_CPP_SOURCE PRE HF_DIR --outtype bf16 --outfile F [--no-mtp]
"""

import runpy
import sys

source, pre = sys.argv[1:3]
sys.path[:0] = [source, f"{source}/gguf-py"]
from conversion import base  # noqa: E402

base.TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
sys.argv = [f"{source}/convert_hf_to_gguf.py", *sys.argv[3:]]
runpy.run_path(sys.argv[0], run_name="__main__")
