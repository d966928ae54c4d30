"""`openk3 chat`: a conversation in the terminal, streamed, with reasoning dimmed and images attached by name."""

from __future__ import annotations

import os
import readline  # noqa: F401  gives input() a history and line editing
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch

from openk3.commands import terminal
from openk3.commands.errors import UserError, is_user_error
from openk3.commands.flags import Chat
from openk3.commands.generate import TEMPERATURE, TOP_P, check_sampling, context_left, fitting_device, load_tokenizer
from openk3.commands.runs import SHIPPED, about_model, find_model
from openk3.config.model import ModelConfig
from openk3.config.sampling import SamplingDefaults, first, read_sampling
from openk3.inputs.chat import Event, Parser, encode_chat, render
from openk3.inputs.images import ImageError, MediaConfig, preprocess_image
from openk3.inputs.packed import Packed
from openk3.inputs.tokenizer import Tokenizer
from openk3.model.accounting import account
from openk3.model.generate import generate
from openk3.model.k3 import K3

EFFORTS = ("low", "high", "max", "off")
HELP = """\
/image FILE    attach an image to the next question
/effort LEVEL  how long to reason: low, high, max, or off to answer directly
/reset         forget the conversation
/help          this list
/exit          leave (also Ctrl-D); Ctrl-C stops an answer"""
DIM, PLAIN = "\033[2m", "\033[0m"


def run(flags: Chat) -> None:
    """Talk until the input ends."""
    check_sampling(flags)
    directory = find_model(flags.run)
    device = fitting_device(directory, flags)
    tokenizer, media = load_tokenizer(directory), load_media(directory)
    model = K3.from_pretrained(directory, dtype=getattr(torch, flags.dtype), device=device)
    chat = Conversation(model, tokenizer, media, flags, read_sampling(directory))
    for path in flags.image:
        chat.attach(path)
    if flags.message is not None:
        answer(chat, flags.message)
        return
    interactive = sys.stdin.isatty()
    if interactive:
        mark = ";" if directory == SHIPPED else ":"
        print(f"{about_model(directory)}{mark} {chat.num_parameters:,} parameters; /help lists the commands")
    for line in read_lines(interactive):
        if line.startswith("/"):
            if not obey(chat, line):
                return
        elif line.strip():
            try:
                answer(chat, line)
            except UserError as error:
                if not interactive:
                    raise
                print(error)


def read_lines(interactive: bool) -> Iterator[str]:
    """The user's lines; ends with the input, or with Ctrl-C at the prompt."""
    if not interactive:
        yield from (line.rstrip("\n") for line in terminal.read_lines())
        return
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def load_media(directory: Path) -> MediaConfig:
    """How the model's images are cut. Raises ImageError naming the file if it does not fit the model."""
    path = directory / "preprocessor_config.json"
    if not path.exists():
        return MediaConfig()
    media, vision = MediaConfig.from_json(directory), ModelConfig.from_json(directory).vision
    if vision is not None and media.patch_size != vision.patch_size:
        raise ImageError(
            f"{path}: media_proc_cfg.patch_size: {media.patch_size}, but the model's is {vision.patch_size}"
        )
    return media


class Conversation:
    """The messages and images so far, and the model that answers."""

    def __init__(
        self,
        model: K3,
        tokenizer: Tokenizer,
        media: MediaConfig,
        flags: Chat,
        sampling: SamplingDefaults | None = None,
    ) -> None:
        sampling = sampling or SamplingDefaults()
        self.temperature = first(flags.temperature, sampling.temperature, TEMPERATURE)
        self.top_p = first(flags.top_p, sampling.top_p, TOP_P)
        self.model, self.tokenizer, self.flags = model, tokenizer, flags
        self.media = media
        self.effort: str = flags.effort
        self.generator = torch.Generator(model.embed.weight.device).manual_seed(flags.seed)
        self.reset()

    def reset(self) -> None:
        """Forget everything said and attached."""
        self.messages: list[dict[str, Any]] = []
        self.images: list[Any] = []
        self.attached: list[dict[str, Any]] = []

    @property
    def num_parameters(self) -> int:
        """Of the model with its MTP layer, counted as `openk3 plan` does."""
        books = account(self.model.config)
        return books.total + books.mtp

    def attach(self, path: Path) -> str:
        """Read an image for the next question; returns what it is. Raises ImageError or UserError naming the file."""
        if self.model.config.vision is None:
            raise UserError(f"{path}: this model has no vision tower, so it cannot see images")
        # An image takes at most a quarter of the context: the question and the answer need room too.
        most = max(1, self.model.config.text.max_position_embeddings // 4)
        image = preprocess_image(path, self.media, max_tokens=most)
        self.images.append(image.media)
        self.attached.append({"type": "image", "size": list(image.size)})
        return f"{path}: {image.size[0]}x{image.size[1]} pixels, {image.num_tokens} tokens"

    def ask(self, text: str) -> Generator[Event]:
        """Events of the answer as they become certain; an answer that is stopped still joins the conversation.

        Raises UserError, with the conversation as it was, if it has outgrown the model's context.
        """
        content = [*self.attached, {"type": "text", "text": text}] if self.attached else text
        messages = [*self.messages, {"role": "user", "content": content}]
        thinking = self.effort != "off"
        parser = Parser("think" if thinking else "response", tokenizer=self.tokenizer)
        segments = render(messages, thinking=thinking, effort=self.effort if thinking else None)
        ids, _ = encode_chat(self.tokenizer, segments)
        packed, config = Packed.join([ids], images=self.images), self.model.config
        size = packed.expand(config.media_placeholder_token_id).num_tokens
        room = context_left(config, size, "the conversation (/reset forgets it)")
        self.messages, self.attached = messages, []
        tokens = generate(
            self.model,
            packed,
            max_tokens=min(self.flags.max_tokens, room),
            temperature=self.temperature,
            top_k=self.flags.top_k,
            top_p=self.top_p,
            stop_ids=(self.tokenizer.special["<|end_of_msg|>"],),
            generator=self.generator,
        )
        try:
            for token in tokens:
                yield from parser.feed_ids([token])
            yield from parser.finish()
        finally:
            self.messages.append(renderable(parser.message()))


def renderable(message: dict[str, Any]) -> dict[str, Any]:
    """A model's message as it can be shown to the model again: a call needs a name, whatever the model wrote."""
    calls = [call for call in message.pop("tool_calls", []) if call["function"]["name"]]
    return {**message, "tool_calls": calls} if calls else message


def answer(chat: Conversation, text: str) -> None:
    """Print one answer as it comes; Ctrl-C stops it and keeps what was said."""
    kind = ""
    colour = terminal.is_coloured()
    events = chat.ask(text)
    try:
        for event in events:
            if event.kind != kind:
                sys.stdout.write(("\n" if kind else "") + style(event.kind, colour))
                kind = event.kind
            sys.stdout.write(terminal.printable(f"[call {event.text}] " if kind == "call" else event.text))
            sys.stdout.flush()
    except KeyboardInterrupt:
        events.close()
        sys.stdout.write(" (stopped)")
    finally:
        sys.stdout.write(PLAIN if colour else "")
    sys.stdout.write("\n")
    sys.stdout.flush()


def style(kind: str, colour: bool) -> str:
    """What sets reasoning apart from the answer."""
    if not colour:
        return ""
    return DIM if kind == "reasoning" else PLAIN


def obey(chat: Conversation, line: str) -> bool:
    """Carry out a line that starts with a slash; False to leave."""
    command, _, argument = line.partition(" ")
    argument = argument.strip()
    if command in ("/exit", "/quit"):
        return False
    if command == "/help":
        print(HELP)
    elif command == "/reset":
        chat.reset()
        print("forgotten")
    elif command == "/effort" and argument in EFFORTS:
        chat.effort = argument
        print(f"effort {argument}")
    elif command == "/image" and argument:
        try:
            print(chat.attach(Path(os.path.expanduser(argument))))
        except ValueError as error:
            if not is_user_error(error):
                raise
            print(error)
    else:
        print(f"{line}: not understood\n{HELP}")
    return True
