"""Turn an archive of novels into what train_demo.py reads: a GPT-2 style tokenizer and token files.

    python3 examples/prepare_novels.py --novels=english_novels.tar.xz --output=prepared

writes vocab.json, merges.txt (byte-level BPE in GPT-2's file format, <|endoftext|> last), train.bin and
validation.bin (uint16, little-endian, novels separated by <|endoftext|>), and prepared.json (counts, digest).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import ByteLevelBPETokenizer

END_OF_TEXT = "<|endoftext|>"
VALIDATION = {"Doyle_Hound_1902", "Galsworthy_Saints_1919", "Woolf_Night_1919"}
# Left out, so that what is left is in the public domain both in the USA (published 95 years ago) and
# where copyright ends 70 years after the author's death (E. M. Forster died in 1970).
LEFT_OUT = {
    "Galsworthy_River_1933",
    "Woolf_Years_1937",
    "Forster_Angels_1905",
    "Forster_Howards_1910",
    "Forster_View_1908",
}
_SENTENCE_END = (".", "!", "?", ":", '"', "'", "-", "”")
_OPENS_SINGLE = re.compile(r"(?<![\w'])'(?=[A-Za-z])(?!(?:tis|twas|em|ee|un|ll|twill|twere)\b)")
_CLOSES_SINGLE = re.compile(r"(?<=[.,!?;:-])'(?!\w)")
_OPENS_DOUBLE = re.compile(r'(?<!\S)"(?=\w)')


def read_novels(archive: Path) -> dict[str, str]:
    """Return the text of every ``.txt`` member by its name without folder and suffix, sorted by name."""
    with tarfile.open(archive) as tar:
        files = ((Path(member.name).stem, tar.extractfile(member)) for member in tar if member.name.endswith(".txt"))
        return dict(sorted((name, stream.read().decode("utf-8-sig")) for name, stream in files if stream))


def split_paragraphs(text: str) -> list[str]:
    """Undo hard line breaks: some of the files have one line a paragraph, others are wrapped near 70 columns.

    Of the wrapped ones, some separate paragraphs by an empty line. In the rest, a paragraph ends where a
    sentence ends and the next line's first word would still have fitted.
    """
    lines = [line.strip() for line in text.splitlines()]
    lengths = sorted(len(line) for line in lines if line)
    width = lengths[len(lengths) * 95 // 100]
    if width > 100:
        return [line for line in lines if line]
    has_empty_lines = lines.count("") > len(lines) // 20
    paragraphs: list[list[str]] = [[]]
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        paragraphs[-1].append(line)
        fits = len(line) + 1 + len(following.partition(" ")[0]) < width - 2
        if not line or (fits and line.endswith(_SENTENCE_END) and not has_empty_lines):
            paragraphs.append([])
    return [" ".join(parts).strip() for parts in paragraphs if any(parts)]


def tidy(text: str) -> list[str]:
    """Return a novel's paragraphs with straight double quotes round speech and single spaces.

    Headings (no lower-case letter) and paragraphs with Greek or mis-decoded letters are dropped.
    """
    text = text.translate({ord("“"): '"', ord("”"): '"', ord("‘"): "'", ord("’"): "'", ord("_"): ""})
    if len(_OPENS_SINGLE.findall(text)) > len(_OPENS_DOUBLE.findall(text)):
        text = _CLOSES_SINGLE.sub('"', _OPENS_SINGLE.sub('"', text))
    paragraphs = [re.sub(r"\s+", " ", part.replace("--", " - ")).strip() for part in split_paragraphs(text)]
    paragraphs = [re.sub(r"(?<=\w) (?=[,.;!?])", "", part) for part in paragraphs]
    return [part for part in paragraphs if re.search("[a-z]", part) and not re.search("[\u0100-\u1fff]", part)]


def print_plainly(paragraphs: list[str]) -> str:
    """Straight quotes, an empty line between paragraphs: one of the two styles of LAMBADA's texts."""
    return "\n\n".join(paragraphs)


def print_curly(paragraphs: list[str]) -> str:
    """Curly quotes, one line break between paragraphs: the other style."""
    text = "\n".join(paragraphs)
    text = re.sub(r'(?<![\w.,!?;:\'-])"(?=\S)', "“", text).replace('"', "”")
    return re.sub(r"(?<![\w.,!?;:”-])'(?=\w)", "‘", text).replace("'", "’")


def train_tokenizer(texts: Iterable[str], vocabulary_size: int, folder: Path) -> ByteLevelBPETokenizer:
    """Train a byte-level BPE and write it as GPT-2 does: <|endoftext|> takes the last id."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=vocabulary_size - 1, min_frequency=2, show_progress=False)
    trained.save_model(str(folder))
    vocabulary = trained.get_vocab()
    by_id = sorted(vocabulary, key=vocabulary.__getitem__) + [END_OF_TEXT]
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(by_id)}), "utf-8")
    return load_tokenizer(folder)


def load_tokenizer(folder: Path) -> ByteLevelBPETokenizer:
    """Load ``vocab.json`` and ``merges.txt`` from a folder."""
    return ByteLevelBPETokenizer.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))


def encode_novels(tokenizer: ByteLevelBPETokenizer, novels: dict[str, list[str]]) -> npt.NDArray[np.uint16]:
    """Encode every novel in both styles, in a shuffled order, <|endoftext|> after each: uint16 [tokens]."""
    end_id = tokenizer.token_to_id(END_OF_TEXT)
    texts = [style(novel) for style in (print_plainly, print_curly) for novel in novels.values()]
    random.Random(1234).shuffle(texts)
    batches = (tokenizer.encode_batch(texts[start : start + 16]) for start in range(0, len(texts), 16))
    return np.concatenate([np.array([*novel.ids, end_id], dtype="<u2") for batch in batches for novel in batch])


def main() -> None:
    """Read, tidy, train the tokenizer if the output folder has none, encode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--novels", type=Path, required=True, help="tar archive of UTF-8 .txt files")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--vocabulary-size", type=int, default=8000, help="entries, <|endoftext|> included")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)

    novels = {name: tidy(text) for name, text in read_novels(arguments.novels).items() if name not in LEFT_OUT}
    training = {name: paragraphs for name, paragraphs in novels.items() if name not in VALIDATION}
    validation = {name: paragraphs for name, paragraphs in novels.items() if name in VALIDATION}
    if (arguments.output / "merges.txt").exists():
        tokenizer = load_tokenizer(arguments.output)
    else:
        styles = (print_plainly, print_curly)
        texts = (style(novel) for style in styles for novel in training.values())
        tokenizer = train_tokenizer(texts, arguments.vocabulary_size, arguments.output)

    facts: dict[str, str | int] = {"novels_sha256": hashlib.sha256(arguments.novels.read_bytes()).hexdigest()}
    for name, part in (("train", training), ("validation", validation)):
        tokens = encode_novels(tokenizer, part)
        tokens.tofile(arguments.output / f"{name}.bin")
        characters = sum(len(print_plainly(novel)) for novel in part.values())
        facts |= {f"{name}_novels": len(part), f"{name}_characters": characters, f"{name}_tokens": tokens.size}
    (arguments.output / "prepared.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
