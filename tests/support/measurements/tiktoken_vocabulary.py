"""A small vocabulary as NeMo keeps tiktoken's, and tiktoken's ids of texts, stored in tests/data/tiktoken.json.

Made by tiktoken 0.14.0 (``pip install tiktoken==0.14.0``), from the repository's root:

    PYTHONPATH=tests:. python -m support.measurements.tiktoken_vocabulary tests/data/tiktoken.json
"""

from __future__ import annotations

import base64
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "data/tiktoken.json"
# NeMo, tiktoken_tokenizer.py: PATTERN_TIKTOKEN.
PATTERN = (
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
    "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
    "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
SAMPLE = (
    "The quick brown foxes jumped over the lazy dogs; then they thought of another thing. "
    "aaaa aaaaaaaa banana bananas\n"
    "Größe, Straße und Übermut sind schön. Ça va déjà très bien, n'est-ce pas? Это хорошо, и это тоже хорошо.\n"
    "日本語の文章と日本の言葉。 مرحبا بالعالم 12345 6789 !!! ??? \t\t  \r\n\r\n  def f(x):\n    return x + 1\n"
)
TEXTS = (
    *SAMPLE.splitlines(keepends=True),
    *(
        "",
        " ",
        "a",
        "aaaaa",
        "aaa aaaaaaa",
        "the the THE The",
        "don't I'LL we've",
        "x=1;y=22;z=333",
        "\n\n \n",
        "   end",
    ),
    *(
        "naïve café",
        "e\u0301tude",
        "😀👩‍👩‍👧 ok",
        "日本",
        "ﬁne ǅ",
        "</s> <s> <unk>",
        "<SPECIAL_7>",
        "\u00a0x\u2003y",
        "tab\tand\r\nline/",
    ),
)


def learnt_tokens(count: int) -> list[bytes]:
    """The 256 bytes and what the most frequent neighbours of the sample come to, one after another."""
    words = [[bytes([byte]) for byte in word.encode()] for word in SAMPLE.replace(" ", "\0 ").split("\0")]
    tokens = [bytes([byte]) for byte in range(256)]
    while len(tokens) < count:
        pairs = Counter(pair for word in words for pair in zip(word, word[1:], strict=False))
        fresh = [(pair, n) for pair, n in pairs.items() if b"".join(pair) not in tokens]
        pair = max(fresh, key=lambda entry: (entry[1], entry[0]))[0]
        tokens.append(b"".join(pair))
        for word in words:
            for at in range(len(word) - 1, 0, -1):
                if (word[at - 1], word[at]) == pair:
                    word[at - 1 : at + 1] = [b"".join(pair)]
    return tokens


def as_nemo(tokens: list[bytes]) -> list[dict[str, Any]]:
    """A vocabulary in NeMo's words."""
    return [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "replace")}
        for rank, token in enumerate(tokens)
    ]


def texts() -> list[str]:
    """The texts above, and pieces of the sample in any order."""
    rng = random.Random(3)
    mixed = ["".join(rng.choices(SAMPLE, k=rng.randint(1, 40))) for _ in range(60)]
    return [*TEXTS, *mixed, *("".join(rng.choices("an b", k=20)) for _ in range(20))]


def write(path: Path) -> None:
    """Ask tiktoken."""
    import tiktoken  # type: ignore[import-not-found]  # it is needed to make the data, not to read it

    tokens = learnt_tokens(420)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    encoding = tiktoken.Encoding("small", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    cases = [{"text": text, "ranks": encoding.encode(text)} for text in texts()]
    path.write_text(json.dumps({"vocabulary": as_nemo(tokens), "cases": cases}, ensure_ascii=False, indent=0) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
