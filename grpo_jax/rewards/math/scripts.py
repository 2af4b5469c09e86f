r"""Reads answers in other scripts than Latin: translates digits and signs, and finds the value among words.

Words are known by kind alone: words before an answer (MARK), scales, counters, endings of sentences, and words that
make a value no answer (HEDGED: not, at least, half). A text with several values, or with a HEDGED word, stays as it is.
"""

# ruff: noqa: RUF001
import re
import unicodedata

# signs that Unicode's tables relate to no ASCII sign; after a full stop there is a space, as there is in English
SIGNS = {'。': '. ', '।': '. ', '॥': '. ', '、': ', ', '،': ', ', '؛': '; ', '؟': '?', '٫': '.', '٬': ',', '٪': '%'}
SIGNS |= dict.fromkeys('\u2212\ufe63\u2010\u2011', '-')
FORMS = {'<fraction>': ' ', '<super>': '^', '<sub>': '_'}  # 2 1/2 for 2½, 10^2 for 10², 10_2 for 10₂


class _Characters(dict):
    """For str.translate: digits of any script as ASCII, full-width signs in usual width, '' for marks without width."""

    def __missing__(self, code):
        """The text for a character code that is looked up the first time; it is kept."""
        character, category = chr(code), unicodedata.category(chr(code))
        if category == 'Nd':
            character = str(unicodedata.decimal(character))
        elif category == 'Cf':
            character = ''
        elif (form := unicodedata.decomposition(character).partition(' ')[0]) in FORMS:
            plain = unicodedata.normalize('NFKC', character)
            character = FORMS[form] + plain.replace('\u2044', '/').replace('\u2212', '-')
        elif unicodedata.east_asian_width(character) == 'F':
            character = unicodedata.normalize('NFKC', character)
        self[code] = SIGNS.get(character, character)  # each character is worked out once
        return self[code]


CHARACTERS = _Characters()
LONE_NUMERAL = re.compile(r'\W*[〇零一二三四五六七八九十百千万億亿两兩]+(?:分[之の][一二三四五六七八九十]+)?\w{0,4}\W*')

# from Cyrillic on, without the blocks of signs
LETTERS = '\u0400-\u1cff\u3005-\u3007\u3040-\u312f\u3131-\u9fff\ua960-\ud7fb\uf900-\ufaff\ufb50-\ufdff\ufe70-\ufefc'
FOREIGN = re.compile(f'[{LETTERS}]')
ARABIC, DEVANAGARI = '[\u0600-\u06ff]', '[\u0900-\u097f]'
# the answer stands after the last of these
MARK = re.compile(
    rf'答案|答え|解答|正解|答(?=[:是为は])|(?<!不)[选選](?![项項択择擇])|[정해]?답(?=[은는이: ])|'
    rf'(?<!\w)(?i:ответ)(?!\w)|उत्तर|जवाब|(?<!ليس )(?<!ليس ال)(?<!ليست ال)(?:ال)?(?:جواب|[إا]جابة)(?!{ARABIC})'
)
# `or` and `and` between two values
JOINED = re.compile(r'(?<=[0-9A-Z)}$])\s*(?:或者?|和|と|または|또는|[와과]|(?i:или|и)|या|और|أو|و)\s*(?=[-$(0-9A-Z\\])')
# not, wrong, at least, at most, more or less than, too, half, times, squared
HEDGED = re.compile(
    # Chinese and Japanese
    '不[是对等能足超少大小满滿选選到]|并非|[没沒]有|或|[错錯]|至[少多]|最[少多]|以[上下](?!より|から)|'
    '[大小多少高低][于於]|比 ?(?=[0-9])|超[过過える]|未[满満]|太[大小多少高低]|'
    '(?<=[0-9个個时時間间天月年])半|一半|除了|以外|倍(?![数數])|'
    'の?[二2]乗|的[平立]方|ません|ではな|でな|くない|少なくとも|多くとも|または|より[多少大小高低]|すぎ|'
    # Thai, Korean
    'ไม่|หรือ|อย่าง(?:น้อย|มาก)|กว่า|เกิน|ครึ่ง|'
    '아[니닌닐닙]|않|이[상하]|미만|초과|적어도|최[소대](?=[ 0-9])|절반| 반(?=입|이|$)|'
    '또는|너무|제곱|보다|배(?=입|이|$)|틀[렸린립]|'
    # Russian
    r'(?i:(?<!\w)(?:не|нет|или|либо|кроме|слишком|более|менее|больше|меньше|свыше|вдвое)(?!\w)|'
    r'(?:минимум|максимум)(?= [0-9])|неверн|неправ|половин|в квадрате\W*$)|'
    # Hindi
    rf'नहीं|कम से|से (?:अधिक|कम|बड|छोट)|यादा|ग़?लत|(?<!{DEVANAGARI})(?:या|न|बहुत|आध[ाे]|का वर्ग)(?!{DEVANAGARI})|'
    # Arabic
    rf'(?<!{ARABIC})(?:لا|أو|غير|ليست?|نصف|جدا|مربع(?= [0-9]))(?!{ARABIC})(?! ال?قطر)|الأقل|الأكثر|'
    '[أا](?:كثر|قل|كبر|صغر) من|خط[أا]'
)
NO_SOLUTION = re.compile(
    r'[无無]解|解(?:は|が)?(?:なし|な[いく]|ありません)|해[가는] ?없|нет (?:\w+ )?решени|कोई (?:\S+ )?हल नहीं|'
    r'لا (?:يوجد|توجد) (?:حل|حلول)'
)
NEGATIVE = re.compile(r'(?:[负負]|マイナス|마이너스|음수|(?i:минус)|ऋण(?:ात्मक)?|माइनस|سالب|ناقص)\s*(?=[$.0-9])')
# words after a number that are part of it, by the power of ten that they stand for
SCALES = [
    (re.compile(rf'(?<=[0-9])\s*(?:{words})[а-я]*'), f'e{power}')
    for power, words in (
        (6, '백만|(?i:миллион|млн)|मिलियन|مليون|ملايين'),
        (9, '(?i:миллиард|млрд)|مليار'),
        (7, '千万|천만|करोड़'),
        (8, '[億亿억]'),
        (4, '[万萬만]'),
        (3, '[千천](?![克米卡瓦])|(?i:тыс)|ह[^ ]{0,2}ार|[أآا]لا?ف'),
        (5, 'लाख'),
        (2, '[百백]'),
    )
]
COUNTER = re.compile('[个個箇枚本名匹只隻条條张張台頭头件次回册冊辆种種通つ개명살번장마권대]|人(?!民)')
ENDING = re.compile(
    '(?:です|である|だ|でした|となる|となります|になる|になります|입니다|이다|이에요|예요|है|हैं|होगा|होंगे|होगी)$'
)
NUMERALS = re.compile('[〇零一二三四五六七八九十百千万億亿两兩]+')
SHARE = re.compile(r'([0-9]+)(?:分之|分の|분의)\s*([0-9]+)')
TEXT = re.compile(rf'\\(?:text\w*|mbox|mathrm)\s*\{{([^{{}}]*[{LETTERS}][^{{}}]*)\}}')
POWER = re.compile(rf'(?<=[{LETTERS}])\s*\^\s*\{{?([23])\}}?')  # of a unit
SENTENCE = re.compile(r'[.!?](?=\s|$)|\n')
CLAUSE = re.compile(rf'(?<=[{LETTERS}]),|,(?=\s*[{LETTERS}])|;')
VALUE = re.compile(rf'[^{LETTERS}]*[0-9A-Za-z][^{LETTERS}]*')
WORDS_BEHIND = 4  # with more words behind its number a text is a sentence about the number


def translate(text: str) -> str:
    """The text with digits and signs of other scripts as ASCII, by CHARACTERS."""
    return text if text.isascii() else text.translate(CHARACTERS)


def is_foreign(text: str) -> bool:
    """Whether a text has letters of another script than Latin and Greek."""
    return not text.isascii() and FOREIGN.search(text) is not None


def read_value(text: str) -> str:
    r"""The one value among foreign words, with a unit after it as \text{unit}; any other text unchanged.

    text: as `translate` returns it. A text that says that there is no solution gives \emptyset.
    """
    if not is_foreign(text):
        return text
    if NO_SOLUTION.search(text) and not re.search('[0-9]', text):
        return r'\emptyset'
    *before, plain = MARK.split(POWER.sub(lambda power: ' ²³'[int(power[1]) - 1], TEXT.sub(r' \1', text)))
    plain = SHARE.sub(_share, _write_numerals(plain))
    for pattern, replacement in (*SCALES, (JOINED, ', '), (NEGATIVE, '-')):
        plain = pattern.sub(replacement, plain)
    sentences = [sentence for sentence in SENTENCE.split(plain) if VALUE.search(sentence)]
    if not sentences:
        return text
    clauses = CLAUSE.split(sentences[0 if before else -1])
    stating = [i for i, clause in enumerate(clauses) if VALUE.search(clause)]
    index = stating[0 if before else -1]
    values = list(VALUE.finditer(clauses[index]))
    values = [value for value in values if re.search('[0-9]', value[0])] or values  # not the x of `x is 3`
    behind = clauses[index][values[0].end() :].split()
    if len(values) > 1 or len(behind) > WORDS_BEHIND or HEDGED.search(','.join(clauses[index:])):
        return text
    value = re.sub(r'^[\s:=,;*\u2013\u2014]*(?:-\s+)?|[\s:=,;*(]+$', '', values[0][0])
    unit = ENDING.sub('', behind[0].strip('.,;:)')) if behind else ''
    return value if not unit or COUNTER.match(unit) or not value[-1:].isdigit() else f'{value}\\text{{{unit}}}'


def _share(match):
    """2/3 for a match of SHARE, which has the denominator 3 first; 25% for 25 hundredths."""
    below, above = match.groups()
    return f'{above}%' if below == '100' else f'{above}/{below}'


def _write_numerals(text):
    """A text with its Chinese numerals in digits; a text that has digits already, and a 一 that may mean `a`, stay."""
    if re.search('[0-9]', text):
        return text

    def digits(match):
        behind = text[match.end() :]
        if match[0] == '一' and not re.match(r'\W*$|.分[之の]', COUNTER.sub('', behind, count=1)):
            return match[0]
        return str(_numeral(match[0]))

    return NUMERALS.sub(digits, text)


def _numeral(text):
    """The number of a Chinese numeral, written in digits alone or with words for ten, hundred, ... after digits."""
    total = part = digit = 0
    for character in text:
        number = int(unicodedata.numeric(character, 2))  # Unicode's tables have no value for 两, two
        if number < 10:
            digit = 10 * digit + number
        elif number < 10_000:
            part, digit = part + (digit or 1) * number, 0
        else:
            total, part, digit = total + (part + digit) * number, 0, 0
    return total + part + digit
