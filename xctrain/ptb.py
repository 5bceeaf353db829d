"""The words of an English caption as published caption scores count them, without Java.

Scores can only be compared when captions are cut into the same words. These are the words that the COCO caption
evaluation gets from Stanford's PTBTokenizer (CoreNLP 3.4.1, ``-preserveLines -lowerCase``) once it has removed a list
of punctuation. The rules were found by giving that program text and reading what it answers; ``tests/golden`` holds
answers, and a slow test asks it again where Java is.

At each place the longest match counts, the first rule on a tie; what a rule only looks at (``ahead``) counts too. What
no rule matches is skipped: quotes, single punctuation marks, signs it does not know. Brackets stay, as ``-lrb-`` and so
on, because the list of what is removed has them in capitals, after lower-casing.

Known differences: a line break or no-break space of any kind is a blank here (there, some shift all later captions by
a line); letters newer than Unicode 6 are words here and dropped there; some web addresses and rare text faces.
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
    "A K An As At He If In It So We But Her Now One Our She The Yet You Here Last Many More Once Some Such That Then They "
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
_CLITIC = rf"{_Q}(?i:[sdmn]|ll|re|ve)"
_NUMBER = r"[-+]?(?:\d*(?:[.:,]\d+)+|\d+)"
_DOTTED = rf"{_L}{_A}*(?:[.!?]{_L}{_A}*)*"  # numpy.array, a!b
_HYPHENED = rf"{_A}+(?:[-_‐‑]{_A}+)*"
_ELIDED = rf"(?:[A-HJ-XZdlno]{_Q}{_A}{{2,}}|{_L}+[aeiouyAEIOUY]{_Q}[aeiouyAEIOUY]{_L}*)"  # O'Hare, ma'am
_ACRONYM = r"[A-Za-z](?:\.[A-Za-z])*\."


def _any(words: str) -> str:
    return f"(?i:{'|'.join(words.split())})"


_RULES = [
    re.compile(rule)
    for rule in (
        r"</?[A-Za-z!][^<>]*>",
        r"(&)(?:amp|AMP);|&(?:lt|gt|#\d+);|()&(?:quot|apos|[mn]dash|nbsp);",
        # cannot, gonna ...; isn't; 'tis; clitics; words with an apostrophe at an end; words with one inside
        rf"(?i:(can)(not)|(gon)(na)|(got)(ta)|(wan)(na)|(gim)(me)|(lem)(me))(?P<ahead>(?!{_Q}{_L}|[-_/]|[.!?]{_L})(?!{_A})[\s\S]|$)",
        rf"{_L}*(?![nN]){_L}(?P<ahead>[nN](?:[‘`]|{_Q})[tT])",
        rf"[nN](?:[‘`]|{_Q})[tT]",
        r"'[tT](?P<ahead>(?i:is|was))",
        rf"{_Q}[nN]{_Q}",
        rf"{_L}+(?P<ahead>{_CLITIC}(?!{_L}))",
        rf"{_CLITIC}(?P<ahead>(?!{_L})[\s\S]|$)",
        rf"{_Q}(?i:em|till?|cause|[2-9]0s)",
        rf"{_Q}\d\d(?P<ahead>\s|$)",
        rf"(?i:ol|somethin|[jdl]){_Q}",
        rf"[yY]{_Q}(?P<ahead>{_L})",
        rf"(?i:cap{_Q}n|nat{_Q}l|li'l|c'mon|s'mores|qu{_Q}{_L}+|[cn]{_Q}est|d{_Q}y[ea]|o{_Q}th)",
        rf"{_ELIDED}",
        rf"(?:{_HYPHENED}[-_])?[dDoOlLA-HJ-XZ]{_Q}{_A}{{2,}}(?:[-_]{_A}+)*",
        # addresses, names with @ and #, numbers
        rf"(?i:https?://{_U}+\.{_U}*[^\s\"<>|(){{}}.!?,'-])",
        r"(?i:(?:www\.(?:[^\s\"<>|(){}.!?,/'-]+\.)*[^\s\"<>|(){}.!?,/'-]{1,}|(?:[A-Za-z][A-Za-z0-9]*\.)+(?:com|net|org|edu))(?:/[^\s\"<>|(){}]+[^\s\"<>|(){}.!?,'-])?)",
        rf"[A-Za-z0-9]{_U}*@(?:[^\s\"<>|().{{}}]+\.)*[^\s\"<>|().{{}}]+",
        r"@[A-Za-z_][A-Za-z0-9_]*",
        rf"#{_L}+|[cC]\+\+|[cCfF]#",
        rf"{_NUMBER}|\d*(?:[.:,]\d+)+-{_A}+",
        r"\(\d{2,3}\)[ \u00a0]?\d{3,4}[-/. \u00a0]?\d{3,5}",
        r"[A-Z]{1,2}\$",
        # abbreviations; any word before a period and , ; or :
        rf"(?:{_any(_CLOSERS)}|[Pp][Hh]\.[Dd]|(?:{_PLACES.replace(' ', '|')}))\.(?P<ahead>[\s\S]|$)",
        rf"(?:{_any(_NUMBERED)}\.(?P<ahead>\s?\d))",
        rf"[A-Za-z](?P<ahead>\.\s+(?=[A-Z]){_any(_STARTERS)}(?=\s))",
        rf"(?:{_any(_TITLES)}\.|{_ACRONYM})",
        rf"(?:{_any(_TITLES + ' ' + _NUMBERED)}\.|{_ACRONYM}|[A-Za-z](?:\.[A-Za-z])+)-{_A}+(?:[-_]{_A}+)*",
        rf"(?:{_A}+-)+[A-Za-z](?:\.[A-Za-z])+\.?(?:-{_A}+)*",
        rf"(?:{_DOTTED}|{_HYPHENED}|{_ELIDED}|[A-Z]+(?:&[A-Z]+)+)\.(?P<ahead>[,;:])",
        rf"{_DOTTED}",
        rf"{_HYPHENED}",
        r"[A-Z]+(?:(?:&|&amp;)[A-Z]+)+",
        r"[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*(?:/[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*){1,2}",
        # text faces; runs of one sign, of which dots and dashes count as nothing; single signs and brackets
        r"[<>]?[:;=][-o*']?[()DPdpO\\{@|\[\]](?P<ahead>[^A-Za-z0-9]|$)",
        r"\(?[-^x=~<>'][_.][-^x=~<>']\)?",
        r"\.{3,}()|-{2,}()|[!?]{2,}|#+|\*+|_+|@+|<<|>>",
        rf"{_SIGN}|[()\[\]{{}}]",
    )
]
_NORMAL_QUOTE = re.compile(rf"{_CLITIC}|[nN](?:[‘`]|{_Q})[tT]")
_LINE_BREAK = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_PLAIN = re.compile(r"\s*([A-Za-z]{2,})(?=\s|$|[.,](?:\s|$))")
_NOT_PLAIN = frozenset(f"{_TITLES} {_CLOSERS} {_PLACES.lower()} {_NUMBERED} cannot gonna gotta wanna gimme lemme".split())
_WRITTEN = {
    **{"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"},
    **{"\u20ac": "$", "\u00a4": "$", "\u20a0": "$", "\u00a3": "#", "\u00a2": "cents"},
    **{"\u00bc": "1/4", "\u00bd": "1/2", "\u00be": "3/4", "\u2153": "1/3", "\u2154": "2/3"},
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
        parts = text[place:end].split()
    words.extend(_write(part) for part in parts if part)
    return end


def _write(token: str) -> str:
    if token in _WRITTEN:
        return _WRITTEN[token]
    if _NORMAL_QUOTE.fullmatch(token):
        token = token.replace("’", "'").replace("&apos;", "'").replace("‘", "`")
    return token.lower().replace("(", "-lrb-").replace(")", "-rrb-").replace("&amp;", "&")
