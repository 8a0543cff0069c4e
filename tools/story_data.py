"""Training text for the bundled model: read, clean, split, and lay out as token rows.

Two sources, both packed as `.tar.xz` in the data folder: short simple stories (African Storybook,
CC BY) and public-domain children's books. A small model learns to write sentences from simple
text, so only the plainer books are used, and the simple stories are drawn far more often than
their size would give them.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, SYSTEM, USER, ASSISTANT, END = SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)

# Share of the training tokens from each group, from a given part of the training time on.
# "simple" is text for young readers. The short stories come often while the model learns to
# write sentences; they are few, and it would learn them by heart if that went on to the end.
MIXES = (
    (0.00, {"stories": 0.13, "simple": 0.20, "tales": 0.45, "novels": 0.22}),
    (0.15, {"stories": 0.19, "simple": 0.28, "tales": 0.41, "novels": 0.12}),
    (0.70, {"stories": 0.05, "simple": 0.15, "tales": 0.50, "novels": 0.30}),
)
BOOKS = {
    "simple": (
        "Aesop's_Fables.md",
        "Great_Big_Treasury_of_Beatrix_Potter.md",
        "Grimms'_Fairy_Tales.md",
        "The_Boxcar_Children.md",
        "The_Story_of_Doctor_Dolittle.md",
    ),
    "tales": (
        "Aladdin_and_the_Magic_Lamp.md",
        "Alice's_Adventures_in_Wonderland.md",
        "Andersen's_Fairy_Tales.md",
        "A_Kidnapped_Santa_Claus.md",
        "Black_Beauty.md",
        "Dorothy_and_the_Wizard_in_Oz.md",
        "Heidi.md",
        "Lang_Blue_Fairy_Book.txt",
        "Lang_Crimson_Fairy_Book.txt",
        "Lang_Green_Fairy_Book.txt",
        "Lang_Red_Fairy_Book.txt",
        "Lang_Violet_Fairy_Book.txt",
        "Lang_Yellow_Fairy_Book.txt",
        "Ozma_of_Oz.md",
        "The_Adventures_of_Pinocchio.md",
        "The_Book_of_Dragons.md",
        "The_Jungle_Book.md",
        "The_Life_and_Adventures_of_Santa_Claus.md",
        "The_Little_Mermaid.md",
        "The_Marvelous_Land_of_Oz.md",
        "The_Princess_and_the_Goblin.md",
        "The_Wonderful_Wizard_of_Oz.md",
        "Through_the_Looking-Glass.md",
    ),
    "novels": (
        "A_Little_Princess.md",
        "Anne_of_Green_Gables.md",
        "Christmas_Stories.md",
        "Five_Children_and_It.md",
        "Little_Men.md",
        "Little_Women.md",
        "Peter_Pan.md",
        "The_Call_of_the_Wild.md",
        "The_Happy_Prince_&_Other_Tales.md",
        "The_King_of_the_Golden_River.md",
        "The_Railway_Children.md",
        "The_Secret_Garden.md",
        "The_Wind_in_the_Willows.md",
    ),
}
# Books whose sections are stories of their own, so that a section's heading is a title.
COLLECTIONS = ("Aesop", "Grimms", "Andersen", "Great_Big", "Lang_")

# Words a request may name ("a story about a fox"), looked up in the text of each short story.
TOPICS = frozenset(
    re.findall(
        r"\w+",
        """
    ant antelope baboon baby bear bee bird boy buffalo camel cat chameleon chicken cow crab
    crocodile crow dog donkey dragon eagle elephant farmer father fish fisherman fox friend
    frog giant giraffe girl goat goose grandmother hare hen hippo honey horse hunter hyena
    jackal king leopard lion lizard man market merchant miller monkey moon mother mountain
    mouse ogre owl parrot peacock pig prince princess queen rabbit rain rat river robber
    school sheep shepherd sister snake spider squirrel stag sun tailor teacher tortoise tree
    turtle village vulture wasp witch wolf woman
    """,
    )
)


@dataclass
class Story:
    """One document: a whole short story, or a section of a book."""

    source: str
    group: str
    title: str  # empty when the heading is only a chapter number
    text: str
    author: str = ""  # only of the stories whose licence asks for attribution
    held_out: bool = False


# --- reading ---------------------------------------------------------------------------------


def read_archive(path: Path) -> dict[str, str]:
    """Return all text files of a tar archive by base name, decoded leniently."""
    files: dict[str, str] = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            stream = archive.extractfile(member) if member.isfile() else None
            if stream is not None:
                files[Path(member.name).name] = stream.read().decode("utf-8", errors="replace")
    return files


def to_ascii(text: str) -> str:
    """Reduce a text to ASCII: a vocabulary of 2048 has no room for other quotes and letters."""
    text = re.sub("[\u2018\u2019\u201a\u00b4`]", "'", text.replace("\r", "").replace("\t", " "))
    text = re.sub("[\u201c\u201d\u201e]", '"', text)
    text = text.replace("\u2014", "--").replace("\u2013", "-").replace("\u2026", "...")
    text = text.replace("\u00c6", "Ae").replace("\u00e6", "ae").replace("\u00df", "ss")
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def double_quotes(text: str) -> str:
    """Turn 'speech' into "speech" in books that use single quotes, leaving apostrophes alone.

    Mixing both conventions would leave the model undecided about how speech is written.
    """
    elided = r"(?!(?:tis|twas|em|twere|twill|ll|d)\b)"
    opening = re.compile(rf"(?:(?<=[\s(\[-])|^)'{elided}(?=[\w.])", re.I | re.M)
    singles, doubles = len(opening.findall(text)), text.count('"') // 2
    if singles <= doubles:
        return text
    text = opening.sub('"', text.replace('"', "'"))
    text = re.sub(r"(?<=[.,!?;:-])'(?=[\s)\]-]|$)", '"', text, flags=re.M)
    # A closing quote straight after a letter counts only while a quotation is open.
    paragraphs = []
    for paragraph in text.split("\n\n"):
        missing = paragraph.count('"') % 2
        paragraphs.append(
            re.sub(r"(?<=\w)'(?=[\s)\]]|$)", '"', paragraph, count=1) if missing else paragraph
        )
    return "\n\n".join(paragraphs)


def tidy(text: str) -> str:
    """Correct the spacing around punctuation, and remove leftovers of markup."""
    text = re.sub(r"\[[^\]]{0,200}\]|\(\d{1,3}\)|<[^>]{0,80}>", "", text)
    text = re.sub(r"[_*#|\\]+", "", text)
    text = re.sub(r"-{3,}", "--", text)
    text = re.sub(r"[ ]+", " ", text)
    text = re.sub(r" +([,.;:!?])(?=[\s\"']|$)", r"\1", text)
    text = re.sub(r"\.(?: \.)+", "...", text)
    return text.strip()


def unwrap(block: str) -> list[str]:
    """Return paragraphs, with hard line breaks joined; indented verse keeps its lines."""
    paragraphs = []
    for chunk in re.split(r"\n\s*\n", block):
        lines = [line for line in chunk.split("\n") if line.strip()]
        if not lines:
            continue
        verse = len(lines) > 1 and all(line.startswith("  ") for line in lines)
        paragraph = tidy(("\n" if verse else " ").join(line.strip() for line in lines))
        if re.search(r"[A-Za-z]{2}", paragraph):
            paragraphs.append(paragraph)
    return paragraphs


def title_case(heading: str) -> str:
    """'THE FOX AND THE CROW' -> 'The Fox and the Crow'."""
    heading = tidy(heading).strip(" .-")
    capitals = heading.upper() == heading
    small = {"a", "an", "and", "at", "by", "for", "from", "in", "of", "on", "or", "the", "to"}
    small |= {"who", "with"}
    words = (heading.lower() if capitals else heading).split()
    if capitals:
        words = [word[:1].upper() + word[1:] for word in words]
    return " ".join(w.lower() if i and w.lower() in small else w for i, w in enumerate(words))


# --- cleaning --------------------------------------------------------------------------------


def clean_short_story(text: str) -> tuple[str, str, str]:
    """Return title, body and author of one African Storybook file.

    A page of the picture book is a section of the file. Pages often stop in the middle of a
    sentence or without a full stop; both are mended here.
    """
    credits = re.findall(r"^\* (Text|Adaptation|Translat\w+(?: By)?): *(.+?) *$", text, re.M)
    author = "; ".join(n if c == "Text" else f"{c.lower()}: {n}" for c, n in credits)
    body = to_ascii(text.split("* License:", maxsplit=1)[0])
    title, _, body = body.strip().partition("\n")
    paragraphs: list[str] = []
    for page in re.split(r"^##.*$", body, flags=re.M):
        for paragraph in unwrap(page):
            joined = paragraphs and (paragraph[0].islower() or paragraphs[-1].endswith(","))
            if joined and paragraphs[-1][-1] not in '.!?"':
                paragraphs[-1] += " " + paragraph
            else:
                paragraphs.append(paragraph)
    paragraphs = [p + "." if p[-1].isalnum() else p for p in paragraphs]
    return title_case(title.lstrip("# ")), "\n\n".join(paragraphs), author


def markdown_sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield (heading, text) of a Markdown book, without the title block."""
    heading = ""
    for part in re.split(r"^(#+ .*|#+)$", text, flags=re.M):
        if part.startswith("#"):
            heading = part.strip("# ")
        elif not re.match(r"(Title|Author):", heading):
            # What follows the title block is the whole text, or only a remark before a chapter.
            yield ("" if heading.startswith("Year:") else heading), part.replace("-------", "")


def plain_sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield (heading, text) of a Project Gutenberg book, whose headings are in capitals."""
    text = re.split(r"^\s*End of (?:the )?Project Gutenberg", text, flags=re.M)[0]
    pattern = r"\n\n\n+((?:[ ]{0,30}[^a-z\n]*[A-Z]{2}[^a-z\n]*\n){1,3})(?:[^\n]{0,60}\n)?(?=\n)"
    if len(re.findall(pattern, text)) < 5:  # a book that sets its titles in ordinary letters
        pattern = r"\n\n\n\n+([A-Z][^\n]{2,70}\n)(?=\n)"
    parts = re.split(pattern, "\n\n\n" + text)
    for heading, body in zip(parts[1::2], parts[2::2], strict=True):
        yield " ".join(heading.split()), body


def clean_book(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of each section of a book that is long enough to be prose."""
    text = double_quotes(to_ascii(text))
    sections = plain_sections(text) if name.endswith(".txt") else markdown_sections(text)
    for heading, body in sections:
        footnote = re.compile(r"^(?:\(\d+\)|\[\d+\]|Footnote|Produced by|Translat)", re.I)
        paragraphs = [
            p for p in unwrap(re.sub(r"^\s*(?:\(\d+\)|\[\d+\]).*$", "", body, flags=re.M))
            if not footnote.match(p) and p.upper() != p
        ]  # fmt: skip
        clean = "\n\n".join(paragraphs)
        if len(clean) < 250 or re.match(r"(?i)(preface|introduction|contents|dedication)", heading):
            continue
        titled = name.startswith(COLLECTIONS) and not re.match(r"(?i)(chapter|[\divx]+\b)", heading)
        yield (title_case(re.sub(r"\[.*?\]", "", heading)) if titled else ""), clean


def shingles(text: str) -> set[str]:
    """Return all runs of six words, to recognise a story that is in the data twice."""
    words = re.findall(r"[a-z]+", text.lower())
    return {" ".join(words[i : i + 6]) for i in range(len(words) - 5)}


def load_stories(data: Path) -> list[Story]:
    """Return every document of both sources, without duplicates, and mark the held-out split.

    The split is by whole story, from a hash of the text, so that it does not change when the list
    of books does: one in sixteen short stories, one in forty sections of a book.
    """
    stories = []
    for name, text in sorted(read_archive(data / "asp-stories.tar.xz").items()):
        if "* License: [CC-BY]" in text:
            title, body, author = clean_short_story(text)
            stories.append(Story(name, "stories", title, body, author))
    books = read_archive(data / "storybooks.tar.xz")
    for group, names in BOOKS.items():
        for name in names:
            for title, body in clean_book(name, books[name]):
                stories.append(Story(name, group, title, body))
    kept: list[Story] = []
    seen: set[str] = set()
    for story in stories:
        grams = shingles(story.text)
        if len(story.text) < 120 or len(grams & seen) > 0.3 * max(len(grams), 1):
            continue
        seen |= grams
        digest = int(hashlib.sha256(story.text.encode()).hexdigest(), 16)
        story.held_out = digest % (16 if story.group == "stories" else 40) == 0
        kept.append(story)
    return kept


# --- tokens ----------------------------------------------------------------------------------


def train_tokenizer(stories: list[Story], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE on the training stories; the simple ones count several times."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    repeat = {"stories": 5, "simple": 2, "tales": 1, "novels": 1}
    texts = (s.text for s in stories if not s.held_out for _ in range(repeat[s.group]))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclass
class Document:
    """A story as token ids, with what is needed to ask for it in a chat."""

    ids: np.ndarray
    title_ids: np.ndarray  # "Title\n\n", empty when there is none
    requests: list[np.ndarray] = field(default_factory=list)


def chat_requests(story: Story) -> list[str]:
    """Return ways in which a user might have asked for this story."""
    requests = ["Tell me a story.", "Please tell me a short story.", "Can you tell me a story?"]
    title = story.title
    if title:
        requests += [
            f"Tell me the story called {title}.",
            f'Tell me a story called "{title}".',
            f"Tell me a story about {title[0].lower() + title[1:]}.",
            f"Please tell me the story of {title}.",
        ]
    counts = Counter(re.findall(r"[a-z]+", story.text.lower()))
    topics = [w for w, n in counts.most_common() if n > 1 and w in TOPICS][:3]
    with_article = [f"{'an' if w[0] in 'aeo' else 'a'} {w}" for w in topics]
    for topic in with_article:
        requests += [f"Tell me a story about {topic}.", f"Write a short story about {topic}."]
    if len(topics) > 1:
        pair = f"{with_article[0]} and {with_article[1]}"
        requests += [f"Tell me a story about {pair}.", f"I want to hear a story about {pair}."]
    return requests


SYSTEM_PROMPTS = (
    "You are a storyteller.",
    "You tell short, simple stories.",
    "You are a helpful assistant.",
)


class Rows:
    """Training rows, cut from an endless stream of shuffled documents.

    The stream comes in cycles. A cycle holds every fairy tale once and the other groups as often
    as their share asks, in a new order and with each document in a form drawn anew: about a
    third of those that fit a context are put in the chat format. The rows of a batch are cut at
    even distances along the cycle and the batches are shuffled, so that every token is seen equally
    often. (Rows that always open at a document would teach the openings by heart.) A batch follows
    from the seed and the number of tokens seen so far: a resumed run needs no other state.
    """

    def __init__(self, stories: list[Story], tokenizer: Tokenizer, seed: int) -> None:
        self.seed = seed
        self.special = {t: tokenizer.token_to_id(t) for t in SPECIAL_TOKENS}
        self.documents: dict[str, list[Document]] = {g: [] for g in MIXES[0][1]}

        def encode(text: str) -> np.ndarray:
            return np.array(tokenizer.encode(text).ids, dtype=np.int64)

        for story in stories:
            if story.held_out:
                continue
            ids = encode(story.text)
            requests = [encode(r) for r in chat_requests(story)] if len(ids) <= 960 else []
            title = encode(f"{story.title}\n\n") if story.title else encode("")
            self.documents[story.group].append(Document(ids, title, requests))
        self.systems = [encode(s) for s in SYSTEM_PROMPTS]
        self.tokens = {g: sum(len(d.ids) for d in ds) for g, ds in self.documents.items()}
        self.cached: tuple[tuple[int, int], np.ndarray] | None = None

    def cycle_length(self, mix: int) -> int:
        """Return the tokens of a cycle, a multiple of those of a step: no step spans two cycles."""
        return int(self.tokens["tales"] / MIXES[mix][1]["tales"]) // 4096 * 4096

    def layout(self, document: Document, rng: np.random.Generator) -> np.ndarray:
        """Return one document in one of its forms: chat, titled, or the bare text."""
        special = self.special
        if document.requests and rng.random() < 0.35:
            request = document.requests[rng.integers(len(document.requests))]
            parts = [[special[USER]], request, [special[END], special[ASSISTANT]]]
            if rng.random() < 0.3:
                system = self.systems[rng.integers(len(self.systems))]
                parts = [[special[SYSTEM]], system, [special[END]], *parts]
            return np.concatenate([*parts, document.ids, [special[END]]])
        if len(document.title_ids) and rng.random() < 0.25:
            return np.concatenate([document.title_ids, document.ids])
        return document.ids

    def cycle(self, mix: int, number: int) -> np.ndarray:
        """Return all token ids of one cycle."""
        if self.cached is None or self.cached[0] != (mix, number):
            rng = np.random.default_rng((self.seed, number))
            chosen: list[Document] = []
            for group, documents in self.documents.items():
                wanted = MIXES[mix][1][group] * self.tokens["tales"] / MIXES[mix][1]["tales"]
                whole, part = divmod(wanted / self.tokens[group], 1.0)
                chosen += documents * int(whole) + [d for d in documents if rng.random() < part]
            parts: list[np.ndarray] = []
            for index in rng.permutation(len(chosen)):
                parts += [self.layout(chosen[index], rng), np.array([self.special[END_OF_TEXT]])]
            ids = np.resize(np.concatenate(parts), self.cycle_length(mix))
            self.cached = (mix, number), ids
        return self.cached[1]

    def batch(self, seen: int, rows: int, length: int, done: float) -> np.ndarray:
        """Return rows [rows, length + 1] of a step: inputs are [:, :-1] and labels [:, 1:].

        `seen` counts the tokens of the steps before; `done` is the part of the training time that
        has passed, which decides the mix.
        """
        mix = max(i for i, (start, _) in enumerate(MIXES) if done >= start)
        size = self.cycle_length(mix)
        number, at = divmod(seen, size)
        steps = size // (rows * length)
        order = np.random.default_rng((self.seed, number, rows)).permutation(steps)
        step = order[min(at // (rows * length), steps - 1)]
        starts = np.arange(rows) * (size // rows) + step * length
        places = starts[:, None] + np.arange(length + 1)
        return self.cycle(mix, number)[places % size]
