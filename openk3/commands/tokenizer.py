"""`openk3 tokenizer train` learns a tokenizer from text; `openk3 tokenizer encode` shows how a text is cut."""

from __future__ import annotations

import sys

from openk3.commands.errors import UserError
from openk3.commands.flags import TokenizerEncode, TokenizerTrain
from openk3.commands.runs import find_model
from openk3.commands.terminal import read_text
from openk3.data.local_text import gather
from openk3.inputs.tokenizer import Tokenizer, well_formed
from openk3.runtime.staging import staged_folder


def run(flags: TokenizerTrain | TokenizerEncode) -> None:
    """Train or encode, as the flags say."""
    if isinstance(flags, TokenizerTrain):
        train(flags)
    else:
        encode(flags)


def train(flags: TokenizerTrain) -> None:
    """Learn BPE from every readable text file named, and write the released two files into a new directory."""
    if not flags.text:
        raise UserError("--text: name at least one text file or folder to learn from")
    corpus = gather(flags.text)
    texts = [file.text for file in (*corpus.train, *corpus.held_out)]
    with staged_folder(flags.out, may_replace=lambda folder: False) as folder:
        tokenizer = Tokenizer.train(texts, flags.vocab_size, progress=sys.stderr.isatty())
        tokenizer.save(folder)
    num_bytes = sum(len(text.encode()) for text in texts)
    num_tokens = sum(len(tokenizer.encode(text)) for text in texts)
    print(f"{flags.out}: {tokenizer.vocab_size:,} ids ({tokenizer.num_ranks:,} text, 256 special)")
    print(f"learnt from {num_bytes:,} bytes: {num_bytes / max(num_tokens, 1):.2f} bytes per token on them")


def encode(flags: TokenizerEncode) -> None:
    """Print one token per line with its id, then the compression; control tokens' names are plain text here."""
    tokenizer = Tokenizer.load(flags.tokenizer if flags.tokenizer is not None else find_model(None))
    text = well_formed(read_text() if flags.text == "-" else flags.text)
    ids = tokenizer.encode(text)
    if flags.ids:
        print(*ids)
        return
    for token in ids:
        print(f"{token:>8}  {readable(tokenizer.decode_bytes([token]))}")
    num_bytes = len(text.encode())
    print(f"{len(ids):,} tokens for {num_bytes:,} bytes: {num_bytes / max(len(ids), 1):.2f} bytes per token")


def readable(token: bytes) -> str:
    """A token as a quoted string, or its bytes where it is only a part of a character."""
    try:
        return repr(token.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(token)
