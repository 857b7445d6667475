"""Questions that a sentence answers: made by a few rules of English, or by leaving a part of the sentence out."""

import random
import re

from streamrag.core.text import STOP_WORDS

GAP_SHARE = 0.4
"""Of questions that leave a part of the sentence out, also where a rule fits."""

UNCLEAR = {
    *("this", "it", "these", "they", "that", "those", "such", "he", "she", "we", "note", "also", "however", "see"),
    *("changed", "new", "deprecated", "its", "their", "here", "there", "thus", "therefore", "then", "but", "and"),
    *("otherwise", "both", "another", "one", "some", "example", "for", "in", "as", "by", "prev", "next", "other"),
}
"""A sentence that begins with one of these names no subject that a question could name."""

NO_SUBJECT = {
    *("If", "When", "To", "Use", "While", "Since", "After", "Before", "Unless", "Name"),
    *("Return", "Sets", "Returns", "You", "I"),
}
"""What a subject does not begin with."""

ASKED = (
    *("What {}?", "Which {}?", "How {}?", "When {}?", "Where {}?", "Why {}?", "What is {}?", "What does {} do?"),
    *("What happens when {}?", "What happens to {}?", "What about {}?", "Is {}?", "In what {}?", "For which {}?"),
    *("What may {}?", "How is {}?", "What is said of {}?", "Why is {}?", "Who {}?", "How soon {}?", "What does {}?"),
)
"""Around what is left of a sentence."""

COUNTED = re.compile(r"\b(?:\d[\d,.]*|two|three|four|five|six|seven|eight|ten|twice) (?P<unit>[a-z]{3,})\b")
ASKED_COUNT = (
    "How many {unit} {}?",
    "How much {}?",
    "How large is {}?",
    "How long may {} be?",
    "How many {unit} has {}?",
)
ERROR = re.compile(r"\b[A-Z]\w+(?:Error|Exception|Warning)\b")
ASKED_ERROR = ("What is raised when {}?", "Which error {}?", "Which error is raised if {}?", "What do I get when {}?")
BE = "is|are|was|were"
MODAL = "must|should|can|may|cannot|will|might"
VERB = (
    "returns|raises|uses|contains|allows|provides|supports|takes|creates|defines|accepts|specifies|controls|"
    "determines|represents|holds|stores|sends|reads|writes|causes|requires|performs|gives|makes|adds|removes|"
    "opens|closes|starts|stops|checks|describes|indicates|converts|computes|produces|keeps|lets|runs|waits|"
    "shows|prevents|ignores|matches|calls|sets|gets|prints|loads|includes|handles|executes|replaces|expects|"
    "generates|implements|lists|records"
)
SUBJECT = r"(?P<subject>[A-Z][^,;:()]{2,45}?)"

Rule = tuple[re.Pattern[str], tuple[str, ...]]
RULES: tuple[Rule, ...] = tuple(
    (re.compile(pattern), questions)
    for pattern, questions in (
        (
            r"^(?:If|When) (?P<condition>[^,]{8,90}), .*\b(?P<done>raised|returned|ignored|reported|used|set)\b.*\.$",
            ("What is {done} if {condition}?", "What is {done} when {condition}?", "What happens when {condition}?"),
        ),
        (
            r"^.*\b(?P<error>[A-Z]\w+(?:Error|Exception|Warning))\b.* (?:if|when) (?P<condition>[^,;]{8,90})\.$",
            ("What is raised when {condition}?", "Which error is raised if {condition}?", "When is {error} raised?"),
        ),
        (
            rf"^{SUBJECT} (?P<verb>{VERB}) .*\b\d[\d,.]* (?P<unit>[a-z]+s)\b.*\.$",
            ("How many {unit} does {subject} {base}?", "How much does {subject} {base}?"),
        ),
        (
            rf"^{SUBJECT} (?:has|have|takes|is|are) .*\b\d[\d,.]* (?P<unit>[a-z]+s)\b.*\.$",
            ("How many {unit} has {subject}?", "How many {unit} may {subject} have?", "How large may {subject} be?"),
        ),
        (
            r"^(?P<term>\w[^,;:.()]{1,32}): (?P<what>.+)\.$",
            (
                *("What is {term}?", "What does {term} mean?", "What is a {term}?", "What does {term} stand for?"),
                *("What is meant by {term}?", "What does {term} measure?", "What does {term} do?"),
            ),
        ),
        (
            r"^If (?P<condition>[^,]{8,90}), (?P<result>.+)\.$",
            ("What happens if {condition}?", "What if {condition}?", "What happens when {condition}?"),
        ),
        (
            r"^When (?P<condition>[^,]{8,90}), (?P<result>.+)\.$",
            ("What happens when {condition}?", "What is done when {condition}?"),
        ),
        (
            r"^(?:In order to|To) (?P<aim>[^,]{6,80}), (?P<result>.+)\.$",
            ("How do I {aim}?", "How can one {aim}?", "What should I do to {aim}?", "How to {aim}?"),
        ),
        (
            r"^Use (?P<means>[^,;]{3,60}?) (?:to|for) (?P<aim>[^,;]{6,80})\.$",
            ("How do I {aim}?", "What is {means} for?", "What do I need to {aim}?"),
        ),
        (
            rf"^{SUBJECT} (?P<be>{BE}) (?P<done>\w+ed) (?P<link>if|when|unless|until|after|before) (?P<why>.+)\.$",
            ("When {be} {subject} {done}?", "What happens {link} {why}?", "Why {be} {subject} {done}?"),
        ),
        (
            rf"^{SUBJECT} (?P<be>{BE}) (?P<what>.+?),? because (?P<why>.+)\.$",
            ("Why {be} {subject} {what}?", "What is the reason that {subject} {be} {what}?"),
        ),
        (
            rf"^{SUBJECT} (?P<modal>{MODAL}) (?P<what>[^,;]+)\.$",
            ("What {modal} {subject} do?", "{modal} {subject} {what}?"),
        ),
        (
            rf"^{SUBJECT} (?P<verb>{VERB}) (?P<what>[^,;]+)[,;.].*$",
            (
                "What does {subject} {base}?",
                "What {verb} {what}?",
                "What does {subject} do?",
                "Which one {verb} {what}?",
                "How does {subject} {base} {what}?",
            ),
        ),
        (
            rf"^{SUBJECT} (?P<be>{BE}) (?P<done>\w+ed) (?P<link>by|in|as|from|with|to|for) (?P<what>.+)\.$",
            ("How {be} {subject} {done}?", "What {be} {subject} {done} {link}?", "What {be} {done} {link} {what}?"),
        ),
        (
            rf"^{SUBJECT} (?P<be>{BE}) (?P<what>.+)\.$",
            ("What {be} {subject}?", "What does {subject} mean?", "What {be} {what}?", "{be} {subject} {what}?"),
        ),
        (
            rf"^{SUBJECT} (?:has|have) (?P<what>.+)\.$",
            ("What does {subject} have?", "What belongs to {subject}?", "Which has {what}?"),
        ),
    )
)
SYNONYMS = {
    "returned": "given back",
    "raised": "thrown",
    "function": "call",
    "method": "function",
    "default": "usual value",
    "specified": "given",
    "value": "setting",
    "create": "make",
    "remove": "delete",
    "object": "thing",
    "use": "need",
    "contains": "holds",
    "allows": "permits",
    "argument": "parameter",
    "file": "document",
    "error": "failure",
    "started": "begun",
    "wait": "pause",
    "stop": "end",
    "closed": "shut",
    "obtain": "get",
    "determine": "find out",
}


def is_unclear(sentence: str) -> bool:
    return sentence.split()[0].lower().strip(",") in UNCLEAR


def make_question(sentence: str, rng: random.Random) -> str:
    """A question that `sentence` answers."""
    question = None if rng.random() < GAP_SHARE or is_unclear(sentence) else by_rule(sentence, rng)
    return question or with_margin(sentence, rng)


def with_margin(sentence: str, rng: random.Random) -> str:
    """What is left of the sentence without some words that follow one another, in a question."""
    asked: tuple[str, ...] = ASKED
    unit = ""
    left = sentence[:-1]
    for pattern, others in ((COUNTED, ASKED_COUNT), (ERROR, ASKED_ERROR)):
        found = pattern.search(left)
        if found and rng.random() < 0.6:
            asked, unit = others, found.groupdict().get("unit", "")
            left = max(left[: found.start()], left[found.end() :], key=len)
            break
    words = left.split()
    if is_unclear(sentence) and words[0] == sentence.split()[0]:
        del words[0]
    num_left = rng.randrange(2, max(3, min(10, len(words))))
    at = rng.randrange(max(1, len(words) - num_left + 1))
    words = words[at : at + num_left]
    if at == 0:
        words[0] = lowered(words[0])
    if len(words) > 3 and rng.random() < 0.3:
        cut = rng.randrange(1, len(words))
        words = words[cut:] + words[:cut]
    if len(words) > 4 and rng.random() < 0.3:
        words = [word for word in words if word not in STOP_WORDS] or words
    return varied(rng.choice(asked).format(" ".join(words).strip(",;:( "), unit=unit), rng)


def by_rule(sentence: str, rng: random.Random) -> str | None:
    """The question of the first rule that fits."""
    for pattern, questions in RULES:
        found = pattern.match(sentence)
        if found is None or ("subject" in found.groupdict() and sentence.split()[0] in NO_SUBJECT):
            continue
        parts = found.groupdict()
        if "subject" in parts:
            parts["subject"] = lowered(parts["subject"])
        if "verb" in parts:
            parts["base"] = base_form(parts["verb"])
        question = rng.choice(questions).format(**parts)
        if len(question.split()) > 22:
            return None
        question = question[0].upper() + question[1:]
        return varied(question, rng)
    return None


def lowered(subject: str) -> str:
    """As it stands within a sentence."""
    first = subject.split()[0]
    is_name = any(c.isupper() or c in "._()" for c in first[1:])
    return subject if is_name else subject[0].lower() + subject[1:]


def base_form(verb: str) -> str:
    """`returns` as `return`."""
    return verb[:-2] if verb.endswith(("sses", "ches", "shes")) else verb[:-1]


def varied(question: str, rng: random.Random) -> str:
    """With some words replaced or left out, as a person who has not read the sentence would ask."""
    words = question.rstrip("?").split()
    words = [SYNONYMS.get(word, word) if rng.random() < 0.5 else word for word in words]
    if len(words) > 8 and rng.random() < 0.4:
        del words[rng.randrange(4, len(words))]
    if len(words) > 12 and rng.random() < 0.4:
        words = words[: rng.randrange(8, len(words))]
    return " ".join(words) + "?"
