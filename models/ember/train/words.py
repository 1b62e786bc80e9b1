"""Words, values and the hash split that keeps evaluation material out of training.

Every value that a task asks to be copied or computed (names, identifiers, operand pairs, function
names, topics) is drawn through a `World` of one split. A value belongs to the held-out split iff
crc32 of its text is 0 modulo 10, so that no list of held-out values has to be kept anywhere.
"""
import json
import random
import zlib

ONSETS = ("b br c ch cl d dr f fl g gl gr h j k kl l m n p pl pr qu r s sh sk sl sp st t th tr v w y z").split()
VOWELS = "a e i o u ai au ea ee ia io oa ou".split()
CODAS = ["", "", "", "", "n", "r", "l", "s", "m", "k", "t", "nd", "rn", "x", "th", "sh"]
FIRST = ("Ada Alan Alice Amir Ana Anna Arun Ben Bianca Bob Carl Carmen Chen Clara Dana Daniel David Diego Eda Elena "
         "Ella Emil Emma Eric Eva Fatima Felix Finn Freya Gina Grace Hana Hans Hugo Ida Igor Ines Ivan Jack Jana Jin "
         "Joan John Jonas Julia Kai Karl Kira Lara Lea Leo Lina Louis Luca Lucy Maja Marco Maria Mark Marta Max Maya "
         "Mei Mila Mira Nadia Nina Noah Nora Olga Oscar Otto Paul Petra Pia Priya Raj Rosa Ruth Sam Sara Sofia Sven "
         "Tara Theo Tim Tom Uma Vera Victor Wei Yara Yuki Zoe").split()
CITIES = ("Amsterdam Ankara Athens Austin Bangkok Barcelona Basel Beirut Belgrade Bergen Berlin Bern Bogota Boston "
          "Bremen Brussels Bucharest Budapest Cairo Calgary Chennai Chicago Cologne Dallas Delhi Denver Dresden Dublin "
          "Dubai Durban Florence Geneva Ghent Glasgow Graz Hamburg Hanoi Havana Helsinki Houston Istanbul Jakarta Kyiv "
          "Krakow Kyoto Lagos Leipzig Lima Lisbon London Lyon Madrid Manila Marseille Miami Milan Montreal Munich "
          "Nairobi Naples Nice Osaka Oslo Ottawa Paris Perth Porto Prague Quito Riga Rome Rotterdam Salzburg Santiago "
          "Seoul Seville Shanghai Sofia Split Stockholm Sydney Tallinn Tokyo Toronto Turin Utrecht Valencia Vienna "
          "Vilnius Warsaw Zagreb Zurich").split()
VERBS = ("get fetch list find search create add update edit delete remove send cancel book check read write open close "
         "start stop move copy rename share export import schedule assign archive restore approve reject convert "
         "compare count merge split rate review track upload download print lock unlock pause resume verify").split()
NOUNS = ("account address agenda album alarm alert article asset badge balance banner basket bill board bookmark branch "
         "budget bus calendar camera campaign cart case certificate channel chart chat city class client clip cluster "
         "comment commit company contact contract coupon course customer dashboard database deal delivery deployment "
         "device diagram dish document domain draft driver email employee event expense experiment feature file film "
         "flight folder forecast form fund game garden gateway goal graph group guest guide hotel house image incident "
         "invoice issue item job journal key label lamp layer lead lease lesson letter library license light link loan "
         "log lunch machine map meal meeting member memo menu message metric mission model module movie network note "
         "notice notification offer office order package page parcel park partner pass patch patient payment phone photo "
         "picture pipeline plan plant playlist podcast policy poll portfolio post presentation price printer process "
         "product profile project prompt property proposal purchase query queue quiz quote receipt recipe record refund "
         "region reminder rental report repository request reservation resource restaurant result review reward ride "
         "robot role room route rule sale sample scene schedule score script sensor server session shelf shift ship "
         "shipment shop signal site sketch skill song stock storage store story student subscription summary supplier "
         "survey switch table tag task team template tenant test thread ticket timer token tool topic tour trade train "
         "translation trip vehicle vendor version video visit volume voucher wallet warehouse weather webhook website "
         "widget workflow workshop zone").split()
ADJECTIVES = ("active ancient big blue bold brave bright broken busy calm cheap clean clear cold cool dark deep dry early "
              "empty fair fast final fine firm flat fresh full gentle gold good grand gray great green happy hard heavy "
              "high hot huge kind large late lazy light little local long loud lucky main narrow new noisy old open "
              "orange plain pink proud pure quick quiet rare ready red rich ripe rough round rusty safe sharp shiny "
              "short shy silent silver simple slow small smart smooth soft solid strong sweet tall thin tidy tiny warm "
              "weak wet white wide wild wise yellow young").split()
PATH_PARTS = "src lib app data docs tests notes config assets scripts public reports images backup".split()
EXTENSIONS = "txt md py rs js json csv toml yaml html png pdf log sql sh".split()
COMMON: list[str] = []  # frequent words of the training text, set by `load_common`


def load_common(path):
    """Reads the JSON list of frequent words written beside the tokenizer."""
    with open(path, encoding="utf-8") as file:
        COMMON[:] = json.load(file)


def is_held_out(text) -> bool:
    return zlib.crc32(str(text).lower().encode()) % 10 == 0


class World:
    """One seeded source of values of one split ("train" or "heldout")."""

    def __init__(self, seed, split="train"):
        self.rng = random.Random(seed)
        self.held = split == "heldout"
        self.split = split
        self.unseen = False  # whether facts are worded as training never words them, see recall_facts
        self.choice, self.random, self.randint = self.rng.choice, self.rng.random, self.rng.randint
        self.sample, self.shuffle = self.rng.sample, self.rng.shuffle

    def own(self, make):
        """Draws until the value belongs to this split."""
        while True:
            value = make()
            if is_held_out(value) == self.held:
                return value

    def own_ok(self, value):
        return is_held_out(value) == self.held

    def chance(self, p):
        return self.rng.random() < p

    # -- words ---------------------------------------------------------------------------------
    def invented(self, low=2, high=3):
        """A word nobody has seen: two or three random syllables."""
        c = self.rng.choice
        return self.own(lambda: "".join(c(ONSETS) + c(VOWELS) + (c(CODAS) if i else "")
                                        for i in range(self.rng.randint(low, high))))

    def common(self):
        return self.own(lambda: self.choice(COMMON)) if COMMON else self.invented()

    def noun(self):
        return self.own(lambda: self.choice(NOUNS))

    def adjective(self):
        return self.own(lambda: self.choice(ADJECTIVES))

    def word(self):
        r = self.random()
        if r < 0.4:
            return self.noun()
        if r < 0.7:
            return self.common()
        return self.invented() if r < 0.85 else self.adjective()

    def words(self, n):
        return " ".join(self.word() for _ in range(n))

    def phrase(self, low=2, high=4):
        """Several words; the whole phrase is of this split."""
        return self.own(lambda: " ".join(
            self.choice((self.choice(NOUNS), self.choice(ADJECTIVES), self.choice(COMMON or NOUNS)))
            for _ in range(self.rng.randint(low, high))))

    # -- values --------------------------------------------------------------------------------
    def person(self):
        return self.own(lambda: self.choice(FIRST)) if self.chance(0.6) else self.invented().capitalize()

    def full_name(self):
        return f"{self.choice(FIRST)} {self.invented().capitalize()}"

    def city(self):
        return self.own(lambda: self.choice(CITIES)) if self.chance(0.7) else self.invented().capitalize()

    def integer(self, low=1, high=999):
        return self.own(lambda: self.rng.randint(low, high))

    def number(self):
        return self.own(lambda: f"{self.rng.randint(1, 400)}.{self.rng.randint(1, 99):02d}".rstrip("0"))

    def ident(self):
        c = self.rng.choice
        kind = self.rng.randint(0, 3)
        if kind == 0:
            return self.own(lambda: "".join(c("ABCDEFGHIJKLMNPRSTUVWXYZ") for _ in range(self.rng.randint(2, 3)))
                            + f"-{self.rng.randint(100, 9999)}")
        if kind == 1:
            return self.own(lambda: "".join(c("0123456789abcdef") for _ in range(self.rng.randint(6, 8))))
        if kind == 2:
            return self.own(lambda: f"{c(NOUNS)}_{self.rng.randint(10, 9999)}")
        return self.own(lambda: f"{c(NOUNS)}-{c(ADJECTIVES)}-{self.rng.randint(1, 99)}")

    def date(self):
        return self.own(lambda: f"20{self.rng.randint(20, 39)}-{self.rng.randint(1, 12):02d}-{self.rng.randint(1, 28):02d}")

    def clock(self):
        return self.own(lambda: f"{self.rng.randint(0, 23):02d}:{self.rng.randint(0, 11) * 5:02d}")

    def path(self):
        c = self.rng.choice
        return self.own(lambda: "/".join(c(PATH_PARTS + NOUNS) for _ in range(self.rng.randint(1, 3)))
                        + f"/{c(NOUNS)}.{c(EXTENSIONS)}")

    def email(self):
        return self.own(lambda: f"{self.rng.choice(FIRST).lower()}@{self.invented()}.{self.rng.choice(['com', 'org', 'net'])}")

    def url(self):
        return self.own(lambda: f"https://{self.invented()}.{self.rng.choice(['com', 'org', 'io'])}/{self.rng.choice(NOUNS)}")

    def sum_pair(self, low=10, high=99):
        """Two operands whose unordered pair is of this split."""
        while True:
            a, b = self.rng.randint(low, high), self.rng.randint(low, high)
            if is_held_out(f"{min(a, b)}+{max(a, b)}") == self.held:
                return a, b

    def snake(self, low=2, high=3):
        """An identifier such as `merge_silver_order`."""
        return self.own(lambda: "_".join([self.rng.choice(VERBS)] + [
            self.rng.choice(NOUNS if self.rng.random() < 0.6 else (COMMON or ADJECTIVES))
            for _ in range(self.rng.randint(low - 1, high - 1))]))
