"""Convert a model folder of `shapes.py` to GGUF with llama.cpp's own script.

    python to_gguf.py LLAMA_CPP_SOURCE MODEL_FOLDER OUT.gguf

That script recognises tokenizers by a fingerprint and rejects others, such as the made-up one here,
so this script reports the name of a known kind. transformers would load the tokenizer class of the
model's family and add tokens that the embedding has no rows for, so the tokenizer is loaded as the
file says. The rest of the conversion is llama.cpp's.
Needs torch, transformers and the dependencies of the `gguf` package.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    source, model, out = Path(sys.argv[1]).resolve(), *sys.argv[2:]
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    import transformers
    from conversion.base import TextModel  # llama.cpp's, found in its source folder

    plain = transformers.PreTrainedTokenizerFast.from_pretrained
    transformers.AutoTokenizer.from_pretrained = plain
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", model, "--outtype", "bf16", "--outfile", out]
    runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main()
