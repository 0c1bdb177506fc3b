"""What the sessions talk about: long real documents that ship with Python, cut to exact token counts.

Why it exists: a cache of prefixes is worth nothing on made-up text, and the measurement needs prompts of one size.
Laws: the same tokenizer and the same Python give the same tokens in every process, so engines agree on the keys without
    exchanging text. All sessions begin with the same SHARED_TOKENS tokens (the system prompt), and then differ.
Limits: `SESSIONS_MAX` sessions, one per topic below.

    [ system prompt: SHARED_TOKENS | the session's document ............ ] PREFIX_TOKENS  [ question ] NEW_TOKENS
"""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any, Final, NamedTuple

BLOCK_TOKENS: Final = 64
SHARED_TOKENS: Final = 8 * BLOCK_TOKENS
"""Also the prefill chunk: the forward over the system prompt is then the same in every session, bit for bit."""
PREFIX_TOKENS: Final = 32 * BLOCK_TOKENS
NEW_TOKENS: Final = 32

_SYSTEM: Final = (
    "<|im_start|>system\nYou are an assistant for the Python language. Answer in one short sentence, and only from "
    "the page of the reference that the user sends. These definitions hold for every page:\n\n"
)
_SYSTEM_TOPIC: Final = "naming"
_END: Final = "<|im_end|>\n"
_DOCUMENTS: Final = (
    ("string-methods", "What does str.capitalize() return?"),
    ("debugger", "What does the module pdb define?"),
    ("typesmapping", "What does a dictionary map?"),
    ("comparisons", "What does a comparison yield?"),
    ("formatstrings", "Which character fills the field by default?"),
    ("compound", "Which statement tests a condition?"),
    ("attribute-access", "When is __getattr__ called?"),
    ("types", "What is the type of None used for?"),
)
"""Topic and question: each page has more than PREFIX_TOKENS - SHARED_TOKENS tokens in the Pythons that we support."""
SESSIONS_MAX: Final = len(_DOCUMENTS)


class Session(NamedTuple):
    """One conversation. `token_ids` are PREFIX_TOKENS of history and NEW_TOKENS that ask something new."""

    name: str
    topic: str
    question: str
    token_ids: list[int]


def sessions(tokenizer: Any, count: int) -> list[Session]:
    """The first `count` conversations. Raises ValueError if a document is too short on this Python."""
    if not 1 <= count <= SESSIONS_MAX:
        raise ValueError(f"sessions: {count} is not 1 to {SESSIONS_MAX}")
    shared = _system_prompt(tokenizer)
    return [
        Session(f"session {index + 1}", topic, question, shared + _user_turn(tokenizer, topic, question))
        for index, (topic, question) in enumerate(_DOCUMENTS[:count])
    ]


def warmup_tokens(tokenizer: Any) -> list[int]:
    """A short prompt that belongs to no session: the first forward of a process sets up what later ones use."""
    return _encode(tokenizer, str(topics["booleans"]))[:BLOCK_TOKENS]


def _system_prompt(tokenizer: Any) -> list[int]:
    end = _encode(tokenizer, _END)
    text = _encode(tokenizer, _SYSTEM + str(topics[_SYSTEM_TOPIC]))
    return _exactly(text, SHARED_TOKENS - len(end), _SYSTEM_TOPIC) + end


def _user_turn(tokenizer: Any, topic: str, question: str) -> list[int]:
    document = _encode(tokenizer, "<|im_start|>user\n" + str(topics[topic]))
    ask = _encode(tokenizer, f"\n\n{question}{_END}<|im_start|>assistant\n")
    if len(ask) > NEW_TOKENS:
        raise ValueError(f"the question about {topic!r} has {len(ask)} tokens, at most {NEW_TOKENS} are possible")
    return _exactly(document, PREFIX_TOKENS - SHARED_TOKENS + NEW_TOKENS - len(ask), topic) + ask


def _exactly(token_ids: list[int], count: int, topic: str) -> list[int]:
    if len(token_ids) < count:
        raise ValueError(f"the page {topic!r} of this Python has {len(token_ids)} tokens, {count} are needed")
    return token_ids[:count]


def _encode(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
