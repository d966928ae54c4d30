"""The training data of recipe pocket: a tokenizer, and shards of books, conversations and pictures.

python examples/pocket_data.py --books BOOKS --wordnet /usr/share/wordnet --out data/pocket

BOOKS holds one folder per book; docs/pocket.md names the books of the model that comes with openk3, and says how to
train on what this writes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path

from openk3.data.pocket_mix import Knowledge
from openk3.data.pocket_shards import Amounts, Shards, tokenizer_texts
from openk3.inputs.tokenizer import Tokenizer
from openk3.recipes import pocket


def main() -> None:
    """Read the sources, learn the tokenizer if there is none in OUT, then write shards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"))
    parser.add_argument("--out", type=Path, default=Path("data/pocket"))
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    for name, default in vars(Amounts()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    amounts = Amounts(options.talks, options.pictures, options.parts, options.seed)
    start = time.perf_counter()
    knowledge = Knowledge.read(options.books, options.wordnet)
    counts = {name: len(getattr(knowledge, name)) for name in ("chapters", "tales", "words", "facts", "python")}
    print(", ".join(f"{count} {name}" for name, count in counts.items()), flush=True)
    folder = options.out / "tokenizer"
    if not (folder / "tiktoken.model").exists():
        Tokenizer.train(tokenizer_texts(knowledge, options.seed), pocket.VOCAB).save(folder)
    vision, tokenizer = pocket.model().vision, Tokenizer.load(folder)
    for name, size in Shards(options.out, knowledge, tokenizer, vision, amounts).write(options.workers):
        print(f"{name}: {size:,} tokens ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
