"""The words that may follow a number: units of measure, counted things, and words that multiply.

Only words of these lists are ever separated from a value. A word that is not here may carry meaning
(``5 minus one``, ``5 squared``), so an answer with it equals only the same words.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

# base unit -> spellings, with the factor to the base unit where it is not 1
_UNIT_SPELLINGS: dict[str, dict[str, str]] = {
    "m": {
        "1": "m meter meters metre metres",
        "0.0254": "in inch inches",
        "0.3048": "ft foot feet",
        "0.9144": "yd yard yards",
        "1609.344": "mi mile miles",
    },
    "g": {
        "1": "g gm gms gram grams",
        "1000000": "tonne tonnes",
        "453.59237": "lb lbs pound pounds",
        "28.349523125": "oz ounce ounces",
    },
    "s": {
        "1": "s sec secs second seconds",
        "60": "min mins minute minutes",
        "3600": "h hr hrs hour hours",
        "86400": "day days",
        "604800": "week weeks",
    },
    "year": {"1": "yr yrs year years", "1/12": "month months", "10": "decade decades"},
    "l": {"1": "l L liter liters litre litres"},
    "gallon": {"1": "gal gallon gallons", "1/4": "quart quarts", "1/8": "pint pints"},
    "acre": {"1": "acre acres"},
    "hectare": {"1": "hectare hectares"},
    "deg": {"1": "deg degree degrees"},
    "rad": {"1": "rad rads radian radians"},
    "celsius": {"1": "celsius"},
    "fahrenheit": {"1": "fahrenheit"},
    "kelvin": {"1": "K kelvin kelvins"},
    "dollar": {"1": "dollar dollars usd USD", "1/100": "cent cents penny pennies"},
    "euro": {"1": "euro euros EUR"},
    "sterling": {"1": "GBP"},
    "yen": {"1": "yen JPY"},
    "unit": {"1": "unit units"},
    "newton": {"1": "N newton newtons"},
    "joule": {"1": "J joule joules", "4.184": "cal", "1/10000000": "erg ergs"},
    "eV": {"1": "eV"},
    "watt": {"1": "W watt watts"},
    "pascal": {"1": "Pa pascal pascals"},
    "hertz": {"1": "Hz hertz"},
    "volt": {"1": "V volt volts"},
    "ampere": {"1": "ampere amperes amp amps"},
    "ohm": {"1": "ohm ohms"},
    "coulomb": {"1": "coulomb coulombs"},
    "farad": {"1": "farad farads"},
    "tesla": {"1": "tesla teslas"},
    "mole": {"1": "mol mole moles"},
    "lightyear": {"1": "ly"},
    "parsec": {"1": "pc parsec parsecs"},
    "byte": {"1": "byte bytes"},
    "bit": {"1": "bit bits"},
}
_COMPOUND_SPELLINGS = {"mph": "mi/h", "kmh": "km/h", "kph": "km/h", "mpg": "mi/gal", "cc": "cm^3"}

_PREFIX_SYMBOLS = {
    "f": -15, "p": -12, "n": -9, "\\mu": -6, "u": -6, "m": -3, "c": -2, "d": -1, "k": 3, "M": 6, "G": 9,
    "T": 12,
}  # fmt: skip
_PREFIX_NAMES = {
    "femto": -15, "pico": -12, "nano": -9, "micro": -6, "milli": -3, "centi": -2, "deci": -1, "kilo": 3,
    "mega": 6, "giga": 9, "tera": 12,
}  # fmt: skip
_SYMBOLS_WITH_PREFIX = (
    "m", "g", "s", "l", "L", "N", "J", "eV", "W", "Pa", "Hz", "V", "K", "mol", "cal",
    "pc", "ohm",
)  # fmt: skip
_NAMES_WITH_PREFIX = (
    "meter", "meters", "metre", "metres", "gram", "grams", "second", "seconds", "liter", "liters", "litre",
    "litres", "newton", "newtons", "joule", "joules", "watt", "watts", "pascal", "pascals", "hertz", "volt",
    "volts", "ampere", "amperes", "amps", "ohm", "ohms", "parsec", "parsecs", "byte", "bytes", "bit", "bits",
)  # fmt: skip

# Things that problems count. A noun that multiplies (pair, dozen, quarter, half) is not here.
_COUNTED_NOUNS = """
acorns adults albums angles animals antelopes ants apartments apples arrangements arrows articles babies
badges bags balloons balls bananas bars baskets batches beads beans bears beds bees bicycles bikes bills
birds blocks boards boats books bottles bowls boxes boys bracelets branches bricks brothers brownies buckets
bugs buildings bulbs burgers buses bushels bushes businesses butterflies buttons cakes calls calories
cameras candies candles cans cards carrots cars cartons cases cats cells chairs chapters characters
cheerleaders cherries chickens children chips chocolates chords circles classes classmates classrooms clips
clowns coats coins colors combinations comics computers cones containers contestants cookies copies corners
costumes couches countries cousins cows crates crayons cubes cucumbers cupcakes cups customers daisies
dancers desks diagonals digits dimes dinners dishes divisors doctors dogs dolls donuts doors drawings
dresses drinks drops ducks earrings edges eggs elements elephants elves emails employees envelopes episodes
erasers events exercises eyes faces factors families fans farmers feathers fishes flags flavors flights
floors flowers flyers followers friends frogs fruits games gifts giraffes girls glasses goals goats
grandchildren grapes groups guests guitars gumballs hamburgers handshakes hats hens homes horses hotdogs
houses ingredients insects integers intersections invitations items jackets jars jellybeans jerseys jewels
jumps kids kittens knives knots laps leaves legs lemons lessons letters lilies lines lions lizards loaves
lollipops magazines mangoes marbles marchers markers marshmallows matches meals medals meetings members men
messages mice miles monkeys movies muffins mugs multiples nails names necklaces nephews newspapers nickels
nights notebooks notes numbers nurses nuts onions oranges outcomes outfits owls packages packets packs pages
paintings pancakes papers parents participants parts passengers paths patients peaches peanuts pears pencils
penguins pens people peppers permutations persons petals pets phones photos pickles pictures pieces pies
pigeons pigs pills pineapples pipes pizzas planes plants plates players plums points polygons potatoes
presents prizes problems puppies puzzles questions quizzes rabbits races rectangles refrigerators rings
robots rocks rooms roses rows rulers runners sacks sandwiches scarves scoops seashells seats sections
seeds segments sentences servings shares sharks sheep sheets shells shelves ships shirts shoes shots
siblings sides signs sisters skips skirts slices snacks snails snakes socks soldiers solutions songs spiders
spoons squares squirrels stairs stamps stars states steps stickers sticks stones stores stories strawberries
straws streets strings students subjects subsets sweaters sweets swords tables tablespoons tasks teachers
teams teaspoons teeth terms tests texts tickets tiles times tires toes tokens tomatoes towels towers toys
trains trays treats trees triangles tricks trips trucks tulips turkeys turtles tvs values vampires vans
vegetables vehicles vertices videos visitors visits voters votes walls watermelons ways weights whales
wheels windows winners wins women words workers worms years zebras zeroes zeros
"""
_IRREGULAR = {  # irregular: plural -> singular
    "children": "child", "men": "man", "women": "woman", "people": "person", "mice": "mouse",
    "teeth": "tooth", "sheep": "sheep", "knives": "knife", "leaves": "leaf", "loaves": "loaf",
    "shelves": "shelf", "scarves": "scarf", "elves": "elf", "vertices": "vertex", "fishes": "fish",
    "grandchildren": "grandchild", "cookies": "cookie", "brownies": "brownie", "movies": "movie",
    "pies": "pie", "calories": "calorie", "zeroes": "zero", "potatoes": "potato", "tomatoes": "tomato",
    "mangoes": "mango", "quizzes": "quiz", "buses": "bus", "necklaces": "necklace", "horses": "horse",
}  # fmt: skip

_SCALES = {
    "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "tenth": -1, "hundredth": -2,
    "thousandth": -3, "millionth": -6,
}  # fmt: skip
POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
PERCENT = frozenset(("percent", "pct"))

# Words that change a number: never what a gold answer counts, nor its adjective.
_NUMBER_WORDS = frozenset(
    [
        "add",
        "added",
        "and",
        "couple",
        "couples",
        "divided",
        "double",
        "dozen",
        "dozens",
        "dozenth",
        "eight",
        "eighths",
        "equals",
        "factorial",
        "fewer",
        "fifth",
        "fifths",
        "five",
        "four",
        "fourth",
        "fourths",
        "gross",
        "half",
        "halves",
        "hundred",
        "if",
        "is",
        "less",
        "minus",
        "mod",
        "modulo",
        "more",
        "negative",
        "nine",
        "no",
        "none",
        "not",
        "of",
        "one",
        "ones",
        "or",
        "over",
        "pair",
        "pairs",
        "per",
        "plus",
        "point",
        "quarter",
        "quarters",
        "score",
        "scores",
        "seven",
        "six",
        "ten",
        "tens",
        "than",
        "third",
        "thirds",
        "three",
        "threes",
        "times",
        "to",
        "triple",
        "two",
        "twos",
        "under",
        "zero",
    ]
)


@dataclass(frozen=True, slots=True)
class Unit:
    """A base unit or counted noun, and how many of it this spelling is."""

    base: str
    factor: Fraction = Fraction(1)
    is_counted: bool = False  # a counted noun, not a unit of measure


def _singular(noun: str) -> str:
    if noun in _IRREGULAR:
        return _IRREGULAR[noun]
    if noun.endswith("ies"):
        return noun[:-3] + "y"
    if noun.endswith(("xes", "ches", "shes", "sses")):
        return noun[:-2]
    return noun.removesuffix("s")


def _units() -> dict[str, Unit]:
    units: dict[str, Unit] = {}
    for noun in _COUNTED_NOUNS.split():
        units[noun] = units[_singular(noun)] = Unit(f"count of {_singular(noun)}", is_counted=True)
    for base, spellings in _UNIT_SPELLINGS.items():
        for factor, names in spellings.items():
            units |= {name: Unit(base, Fraction(factor)) for name in names.split()}
    plain = dict(units)
    prefixed = ((_PREFIX_SYMBOLS, _SYMBOLS_WITH_PREFIX), (_PREFIX_NAMES, _NAMES_WITH_PREFIX))
    for prefixes, spelled in prefixed:
        for prefix, exponent in prefixes.items():
            for name in spelled:
                scaled = Unit(plain[name].base, plain[name].factor * Fraction(10) ** exponent)
                units.setdefault(prefix + name, scaled)
    units.pop("pm")  # afternoon, hardly ever picometres
    return units | {"kgs": units["kg"], "kms": units["km"], "cms": units["cm"], "kilo": units["kg"],
                    "kilos": units["kg"]}  # fmt: skip


UNITS = _units()
# Units of two letters that follow a number without \text; other such letters are variables.
_BARE_SYMBOLS = frozenset((
    "cm", "mm", "km", "kg", "in", "ft", "yd", "mi", "lb", "oz", "ml", "hr", "gm", "mg",
))  # fmt: skip


def find_unit(word: str) -> Unit | None:
    """Return the unit or counted noun that a word names. The case of symbols counts, of names it does not."""
    if word in UNITS:
        return UNITS[word]
    return UNITS.get(word.lower()) if len(word) > 3 else None


def find_scale(word: str) -> Fraction | None:
    """Return the factor of a word that multiplies, such as ``million`` or ``tenths``; else None."""
    word = word.lower()
    if word == "dozen":
        return Fraction(12)
    exponent = _SCALES.get(word.removesuffix("s"))
    return None if exponent is None else Fraction(10) ** exponent


def compound(word: str) -> str:
    """Return ``mi/h`` for ``mph`` and the like; other words unchanged."""
    return _COMPOUND_SPELLINGS.get(word.lower(), word)


def is_bare_word(word: str) -> bool:
    r"""Return whether letters without ``\text`` after a number are a word and not variables: ``12 cm``."""
    if len(word) <= 2:
        return word in _BARE_SYMBOLS
    if word.lower() in PERCENT or word.lower() in POWERS or word == "per":
        return True
    return any(found is not None for found in (find_unit(word), find_scale(word))) or compound(word) != word


def could_be_counted(word: str) -> bool:
    """Return whether an unknown word of a gold answer can be only the name of what is counted."""
    return len(word) >= 4 and word.endswith("s") and is_adjective(word)


def is_adjective(word: str) -> bool:
    """Return whether an unknown word of a gold answer does not change its number: ``right triangles``."""
    if len(word) < 3 or not word.isalpha() or not word.islower() or word.endswith(("th", "ths")):
        return False
    return word not in _NUMBER_WORDS and find_scale(word) is None
