"""The words of an English caption as published caption scores count them, without Java.

Scores can only be compared when captions are cut into the same words. These are the words that the COCO caption
evaluation gets from Stanford's PTBTokenizer (CoreNLP 3.4.1, ``-preserveLines -lowerCase``) once it has removed a list
of punctuation. The rules were found by giving that program text and reading what it answers; ``tests/golden`` holds
answers, and a slow test asks it again where Java is.

At each place the longest match counts, the first rule on a tie; what a rule only looks at (``ahead``) counts too. What
no rule matches is skipped: quotes, single punctuation marks, signs it does not know. Brackets stay, as ``-lrb-`` and so
on, because the list of what is removed has them in capitals, after lower-casing.

Known differences: a line break or no-break space of any kind is a blank here (there, some shift all later captions by
a line); two different quotes in a row are removed here; letters newer than Unicode 6 are words here and dropped there;
some web addresses and rare text faces. Of 20,000 captions with one or two odd pieces put in, none differs; of 20,000
strings of nothing but odd pieces, 1 in 100.
"""

import re
from collections.abc import Sequence

# Abbreviations that keep their period. Titles stand before a name and join what follows ("St.-John"); closers can end a
# sentence. Places only with a capital, as they are words too; the last ones only before a number.
_TITLES = (
    "adj adm adv alex assoc asst atty ave brig capt cf cie cmdr col cpl dept det dr drs elec ens ft gen gov govs hon insp "
    "invt jos lieut lt maj messrs mfg mlle mme mr mrs ms msgr mt mtg natl pfc ph pres prof pvt rep reps rev sen sens sfc "
    "sgt spc st ste supt treas vs wm"
)
_CLOSERS = (
    "al ala apr ariz assn aug bhd bldg blvd bros calif co colo conn corp cos ct dak dec esq est etc ext feb fla fri ga inc "
    "ind intl jan jr jul jun kan kans ky ltd mar md mich minn mo mon mont neb nev nov oct okla penn plc ppte ppty pte ptes "
    "pty ptys rd rt sep sept seq sq sr sys tel tenn thu thurs tue tues univ va vt wed wis wisc wyo"
)
_PLACES = "Az La Pa Ark Del Ill Ore Tex Mass Miss Wash"
_NUMBERED = "art ca fig figs no nos op pp prop"
_STARTERS = (  # words that begin a sentence: a single letter before one loses its period
    "A An As At He If In It So We But Her Now One Our She The Yet You Here Last Many More Once Some Such That Then They "
    "This What When About According Additionally After Earlier However Other Since Their There These While"
)

# Superscripts, vulgar fractions and circled numbers are letters for Python's \w, not here; nor is anything above U+FFFF.
_NO_LETTER = "[\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u2189\u2460-\u24ff\u2776-\u2793\U00010000-\U0010ffff]"
_MARK = "[\u02d2-\u036f\u0483-\u0487\u0591-\u05bd\u064b-\u065e\u0900-\u0903\u093c-\u094e\u0e31-\u0e3a\u0e47-\u0e4e]"
_SIGN = (
    "[$%&@#+*<>=~|^/\\\\\u00a1\u00a2-\u00a9\u00ac\u00ae-\u00b9\u00bc-\u00bf\u00d7\u00f7\u0e3f\u2016\u2017\u201a\u201e"
    "\u2020-\u2023\u2030-\u2038\u203b\u203e-\u2042\u2044\u2070-\u208e\u20a0\u20a4\u20ac\u2100-\u214f\u2153-\u215e"
    "\u2190-\u2bff\u3001\u3002\u3012\u30fb\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65\uffe0-\uffe6]"
)
_L = rf"(?:(?!{_NO_LETTER})[^\W\d_]|{_MARK})"  # a letter, or a mark that goes with one
_A = rf"(?:(?!{_NO_LETTER})[^\W_]|{_MARK})"  # a letter or digit
_Q = "(?:['’]|&apos;)"  # an apostrophe
_U = r'[^\s"<>|(){}]'  # what an address may hold
_U_LAST = r"""[^\s"<>|(){}.!?,'-]"""
_CLITIC = rf"{_Q}(?i:[sdm]|ll|re|ve)"
_NOT = rf"[nN](?:[‘`]|{_Q})[tT]"
_DOTTED = rf"{_L}{_A}*(?:[.!?]{_L}{_A}*)*"  # numpy.array, a!b
_HYPHENED = rf"{_A}+(?:[-_‐‑]{_A}+)*"
_O_NAME = rf"(?:{_HYPHENED}[-_])?[dDlLoO]{_Q}{_A}{{2,}}(?:[-_]{_A}+)*"  # O'Hare, five-o'clock
_M_NAME = rf"(?:[A-HJ-XZn]{_Q}{_L}{{2,}}|{_L}+[aeiouyAEIOUY]{_Q}[aeiouA-Z]{_L}*)"  # M'Gregor, ma'am
_INITIALS = r"[A-Za-z](?:\.[A-Za-z])*\."


def _any(words: str) -> str:
    return f"(?i:{'|'.join(words.split())})"


_RULES = [
    re.compile(rule)
    for rule in (
        r"</?[A-Za-z!][^<>\n]*>",
        r"&(?:amp|AMP|lt|gt|#\d+);|()&(?:quot|apos|[mn]dash|nbsp);",
        # Two words in one: cannot, gonna; isn't; 'tis. Clitics. Words that begin or end with an apostrophe, or hold one.
        rf"(?i:(can)(not)|(gon)(na)|(got)(ta)|(wan)(na)|(gim)(me)|(lem)(me))"
        rf"(?P<ahead>(?!{_A}|{_Q}{_L}|[-_/]|[.!?]{_L})[\s\S]|$)",
        rf"(?i:cap{_Q}n|nat'l|li'l|c'mon|s'mores|qu{_Q}{_L}+|c{_Q}est|e{_Q}er)",
        rf"[A-Za-z]*[A-MO-Za-mo-z](?P<ahead>{_NOT})",
        _NOT,
        r"'[tT](?P<ahead>(?i:is|was))",
        rf"{_Q}[nN]{_Q}",
        rf"{_L}+(?P<ahead>{_CLITIC}(?![A-Za-z]))",
        rf"{_CLITIC}(?P<ahead>[^A-Za-z]|$)",
        r"'[nN](?P<ahead>[^A-Za-z]|$)",
        r"(?:’|&apos;)(?i:[sdmn]|ll|re|ve)",
        rf"{_Q}(?i:em|till?|cause|[2-9]0s)",
        rf"{_Q}\d\d(?P<ahead>\s|$)",
        rf"(?i:ol|somethin|[jdl]){_Q}",
        rf"[yY]{_Q}(?P<ahead>{_L})",
        _M_NAME,
        _O_NAME,
        # Addresses, names with @ and #, numbers, money.
        rf"(?i:https?://{_U}+\.{_U}*{_U_LAST})",
        rf"(?i:(?:www\.(?:[^\s\"<>|(){{}}.!?,/]+\.)+[a-z]{{2,4}}|(?:[a-z][a-z0-9]*\.)+(?:com|net|org|edu))(?:/{_U}+{_U_LAST})?)",
        r"[A-Za-z0-9][^\s\"<>|(){}]*@(?:[^\s\"<>|().{}]+\.)*[^\s\"<>|().{}]+",
        r"@[A-Za-z_][A-Za-z0-9_]*",
        rf"#{_L}+|[cC]\+\+|[cCfF]#",
        r"[-+]?(?:\d*(?:[.:,]\d+)+|\d+)",
        r"\d+[- \u00a0]\d+[/\u2044]\d+",
        r"(?:\(\d{2,3}\)[ \u00a0]?|\+{0,2}(?:\d{2,4}[- \u00a0])?\d{2,4}[- \u00a0])\d{3,4}[- \u00a0]?\d{3,5}",
        r"[A-Z]+\$",
        # Abbreviations. Any word keeps its period before , ; and :
        rf"(?:{_any(_CLOSERS)}|[Pp][Hh]\.[Dd]|(?:{_PLACES.replace(' ', '|')}))\.(?P<ahead>-?[\s\S]|$)",
        rf"{_any(_NUMBERED)}\.(?P<ahead>\s?\d)",
        rf"[A-Za-z](?P<ahead>\.\s+(?=[A-Z]){_any(_STARTERS)}(?=\s))",
        rf"{_any(_TITLES)}\.|{_INITIALS}",
        rf"(?:(?:{_A}+|{_INITIALS})-)+[A-Za-z](?:\.[A-Za-z])+\.(?:-{_A}+)*",
        rf"(?:{_DOTTED}|{_HYPHENED}|{_O_NAME}|[A-Z]+(?:&[A-Z]+)+)\.(?P<ahead>[,;:])",
        # Words.
        _DOTTED,
        _HYPHENED,
        r"[A-Za-z0-9][A-Za-z0-9.,]*(?:-[A-Za-z0-9]+)+",
        r"[A-Z]+(?:(?:[+&]|&amp;)[A-Z]+)+",
        r"[A-Za-z0-9]+(?:-[A-Za-z]+)*(?:/[A-Za-z0-9]+(?:-[A-Za-z]+)*){1,2}",
        # Text faces. Runs of one sign, of which dots, dashes and quotes count as nothing. Single signs and brackets.
        r"[<>]?[:;=][-o*']?[()DPdpO\\{@|\[\]](?P<ahead>[^A-Za-z0-9]|$)",
        r"[-^x=~<>'][_][-^x=~<>']|\([-^x=~<>'][_][-^x=~<>']\)",
        r"(?:\.{3,}|-{2,}|''|’’)()|[!?]{2,}|#+|\*+|_+|@+|<<|>>",
        rf"{_SIGN}|[()\[\]{{}}]",
    )
]
_NORMAL_QUOTE = re.compile(rf"{_CLITIC}|{_NOT}")
_LINE_BREAK = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_PLAIN = re.compile(r"\s*([A-Za-z]{2,})(?=\s|$|[.,](?:\s|$))")
_NOT_PLAIN = frozenset(
    f"{_TITLES} {_CLOSERS} {_PLACES.lower()} {_NUMBERED} cannot gonna gotta wanna gimme lemme".split()
)
_WRITTEN = {
    "&lt;": "<",
    "&gt;": ">",
    "&amp;": "&",
    "&AMP;": "&",
    "(": "-lrb-",
    ")": "-rrb-",
    "[": "-lsb-",
    "]": "-rsb-",
    "{": "-lcb-",
    "}": "-rcb-",
    "\u20ac": "$",
    "\u00a4": "$",
    "\u20a0": "$",
    "\u00a3": "#",
    "\u00a2": "cents",
    "\u00bc": "1/4",
    "\u00bd": "1/2",
    "\u00be": "3/4",
    "\u2153": "1/3",
    "\u2154": "2/3",
}


def tokenize(captions: Sequence[str]) -> list[list[str]]:
    """The words of each caption, as if the captions stood in one file, one a line.

    That is how the Java program gets them, and it looks over the end of the line: "a sign that reads K." ends in ``k.``
    or, where the next caption begins with a word like "The", in ``k``.
    """
    return [ptb_tokens(caption, after) for caption, after in zip(captions, [*captions[1:], ""], strict=True)]


def ptb_tokens(caption: str, after: str = "") -> list[str]:
    """The lower-case words of ``caption``, without punctuation; ``after`` is the text on the next line."""
    text = _LINE_BREAK.sub(" ", caption.replace("\u00ad", ""))  # a soft hyphen is no character
    end = len(text)
    if after:
        text = f"{text}\n{after}"
    words: list[str] = []
    place = 0
    while place < end:
        plain = _PLAIN.match(text, place)
        if plain and plain[1].lower() not in _NOT_PLAIN:
            if plain.start(1) < end:
                words.append(plain[1].lower())
            place = plain.end()
        else:
            place = _scan(text, place, words)
    return words


def _scan(text: str, place: int, words: list[str]) -> int:
    """Add the words that the best rule finds at ``place`` and return where to go on."""
    best = None
    for rule in _RULES:
        found = rule.match(text, place)
        if found and (best is None or found.end() > best.end()):
            best = found
    if best is None:
        return place + 1
    ahead = best.re.groupindex.get("ahead")
    end = best.end() if ahead is None or best[ahead] is None else best.start(ahead)
    parts = [best[i] for i in range(1, best.re.groups + 1) if i != ahead]
    if all(part is None for part in parts):
        parts = [text[place:end].replace(" ", "\u00a0")]  # one word, for ROUGE-L too
    words.extend(_write(part) for part in parts if part)
    return end


def _write(token: str) -> str:
    if token in _WRITTEN:
        return _WRITTEN[token]
    if _NORMAL_QUOTE.fullmatch(token):
        token = token.replace("’", "'").replace("&apos;", "'").replace("‘", "`")
    return token.lower().replace("(", "-lrb-").replace(")", "-rrb-").replace("&amp;", "&")
