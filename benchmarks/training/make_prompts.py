"""Write user turns that conversations of the training text may begin with. No prompt of a benchmark is among them.

Word problems and everyday requests, from patterns with names, things and numbers drawn by a fixed seed:

    python benchmarks/training/make_prompts.py prompts.jsonl
"""

# ruff: noqa: E501, SIM905 (tables of text)

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SEED, NUM_PROBLEMS, NUM_REQUESTS = 7, 9000, 6000

NAMES = (
    "Anna Omar Lucia Pavel Nadia Tobias Mei Carlos Greta Ivan Fatima Henrik Rosa Dmitri Leila Oscar Priya Simon Hana Victor "
    "Elena Marcus Yuki Andre Clara Rashid Ingrid Felix Amara Jonas Sofia Kofi Mara Stefan Zoe Liam Beatrice Hugo Alma Theo "
    "Nora Emil Tara Bruno Iris Caleb Vera Milan Dora Quentin Selma Arjun Wanda Kenji Lola Boris Edith Rafael Mona Gustav"
).split()
THINGS = (
    "apples pencils stickers marbles books cookies flowers stamps shells candles bottles tickets eggs cards oranges balloons "
    "cupcakes buttons bracelets toys notebooks muffins lemons roses coins beads posters puzzles hats socks mugs bananas "
    "cherries paintings bricks plants pies sandwiches crayons magnets"
).split()
PLACES = (
    "bakery,farm,school,library,toy shop,market,museum,factory,garden,bookstore,zoo,cafe,gym,theater,bus station".split(
        ","
    )
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
PARTS = ["half", "a third", "a quarter", "twice", "three times", "20%", "25%", "10%"]

PROBLEMS = """\
{A} has {a} {t}. {B} gives {A} {b} more, and then {A} gives {c} of them away. How many {t} does {A} have now?
{A} buys {b} boxes of {t} with {c} {t} in each box. If {A} already had {a} {t}, how many {t} are there in total?
A {p} sells {t} for ${c} each. On {d} it sold {a} and on {e} it sold {b}. How much money did it make on both days?
{A} earns ${c} an hour and works {b} hours a day, {f} days a week. How much does {A} earn in {g} weeks?
{A} reads {a} pages on {d}, and twice as many on {e}. The book has {h} pages. How many pages are left to read?
There are {a} {t} in a basket. {A} takes {b} of them, and {B} takes {r} of what is left. How many {t} remain?
A train travels {a} miles in the first hour and {b} miles in the second. How far does it go in {f} hours if it keeps up the average speed?
{A} is {f} years older than {B}. {B} is {b} years old. In {g} years, what will be the sum of their ages?
{A} bakes {a} {t} and puts them into bags of {f}. Each bag sells for ${g}. How much money does {A} make if all bags are sold?
A class has {a} students. {q}% of them play football, and the others play tennis. How many students play tennis?
{A} saves ${b} every week. After {f} weeks {A} spends ${c} on a gift. How much money is left?
A shirt costs ${a}. It is on sale for {q}% off. {A} buys {g} shirts. How much does {A} pay?
{A} has {m} as many {t} as {B}. {B} has {b} {t}. How many {t} do they have together?
{A} runs {g} miles every morning and {f} miles every evening. How many miles does {A} run in {b} days?
A {p} has {f} shelves with {b} {t} on each. If {c} {t} are sold, how many are left?
{A}, {B} and {C} share {h} {t}. {A} gets {a}, {B} gets {b} fewer than {A}, and {C} gets the rest. How many does {C} get?
It takes {A} {f} minutes to make one of the {t}. How many hours does it take to make {h} of them?
{A} fills a tank that holds {h} liters. The pump adds {b} liters a minute, but {g} liters leak out every minute. How many liters are in it after {f} minutes?
{A} wants to buy a bike for ${h}. {A} has ${a} and earns ${c} for every lawn. How many lawns must {A} mow?
At the {p}, adults pay ${c} and children pay ${g}. A group of {f} adults and {b} children visits. What is the total cost?
A farmer has {a} cows and {m} as many sheep. Each animal eats {g} pounds of food a day. How many pounds of food are needed each day?
{A} drinks {g} glasses of water a day, and {B} drinks {f}. How many more glasses does {B} drink in a week of {d} to {d}?
{A} cut a rope of {h} feet into pieces of {f} feet. {A} used {g} pieces. How many feet of rope are left?
A box of {t} weighs {b} pounds. A truck can carry {h} pounds and already holds {a} pounds. How many boxes can be added?
{A} scored {a} points in the first game, {b} more in the second, and half of the first in the third. What is the total?
Each of {f} teams at the {p} has {b} players. {c} players go home. How many players stay?
{A} pays ${a} rent, ${b} for food and ${c} for transport each month. If {A} earns ${k}, how much is saved in {g} months?
A phone costs ${h}, and the price rises by {q}%. Later {A} gets a discount of ${b}. What does {A} pay?
{A} plants {f} rows of {b} flowers. {r} of the flowers are red. How many flowers are red?
{A} had some {t}. After giving {a} to {B} and {b} to {C}, {A} has {c} left. How many {t} did {A} have at first?"""
REQUESTS = """\
Write a short story about {x}.
Explain {y} to a ten year old.
What are the advantages and disadvantages of {z}?
Write a professional email to {w} about {z}.
Give me five tips for {z}.
Compare {y} and {y2}. Use a short list.
Write a poem about {x} in four lines.
Describe {x} with vivid language, in two paragraphs.
Summarize what is known about {y} in three sentences.
Pretend that you are {v}. How would you explain {y}?
I am planning {z}. Make me a plan for a week.
Write a Python function that {u}.
Write a C++ program that {u}. Explain how it works.
What is the difference between {y} and {y2}?
Write a persuasive speech that convinces people of {z}.
Rewrite this sentence to make it clearer: "{x} was seen by {v} near {x2}, and it was late."
List three questions that {w} could ask about {z}, and answer them.
Write a dialogue between {v} and {v2} about {y}.
How does {y} work? Give an example.
Draft a headline and an opening paragraph for a blog post about {z}.
Should a small company care about {y}? Give reasons for and against.
Solve it step by step: if x + {a} = {h}, what is {g} * x?
Is it true that {v} can do without {y}? Discuss it.
Write a review of a book about {x} and {y}.
Create a table of three examples of {y} with a short description of each."""
SCENES = (
    "a lost dog in a big city;an old lighthouse;a dragon who is afraid of fire;the first snow of the year;a market by the sea;"
    "two friends on a long train ride;a robot that learns to paint;a garden at night;a forgotten letter;a storm in the mountains;"
    "a village without clocks;a young musician;a quiet library;a river in autumn;a spaceship that finds a new moon;"
    "a baker with a secret;a walk in the rain;an island full of birds;a detective who never sleeps;a street in Paris"
).split(";")
SUBJECTS = (
    "photosynthesis;inflation;gravity;machine learning;the water cycle;democracy;vaccines;supply and demand;black holes;"
    "the immune system;recursion;electric cars;the French Revolution;renewable energy;DNA;compound interest;plate tectonics;"
    "the internet;climate change;evolution;blockchain;public key encryption;the stock market;antibiotics;sorting algorithms;"
    "quantum computing;the Roman Empire;probability;nuclear power;the greenhouse effect"
).split(";")
PLANS = (
    "working from home;learning a new language;a trip to Japan;running a marathon;saving money;starting a small business;"
    "eating less sugar;a surprise party;moving to another city;writing a novel;public transport;a healthy breakfast;"
    "remote teams;growing vegetables;a job interview;using less plastic;reading every day;a school project;online courses;"
    "a quarterly report"
).split(";")
PEOPLE = "my manager;a customer;my landlord;a teacher;a new colleague;the city council;a friend;a supplier".split(";")
ROLES = (
    "a physics teacher;a chef;a lawyer;an astronaut;a doctor;a farmer;a historian;a travel guide;an economist;"
    "a football coach;a poet;a software engineer"
).split(";")
TASKS = (
    "reverses the words of a sentence;finds the largest number in a list;counts the vowels of a text;"
    "checks whether a word is a palindrome;computes Fibonacci numbers;merges two sorted lists;removes duplicates from a list;"
    "finds all prime numbers below n;sorts names by their last letter;converts Celsius to Fahrenheit;"
    "finds the second largest number;counts how often each word occurs"
).split(";")


def problem(chance: random.Random) -> str:
    """One word problem."""
    first, second, third = chance.sample(NAMES, 3)
    day, other_day = chance.sample(DAYS, 2)
    sizes = {"a": (12, 120), "b": (3, 30), "c": (2, 20), "f": (2, 9), "g": (2, 6), "h": (120, 600), "k": (1500, 4000)}
    values: dict[str, object] = {name: chance.randint(*bounds) for name, bounds in sizes.items()}
    return chance.choice(PROBLEMS.splitlines()).format(
        A=first, B=second, C=third, t=chance.choice(THINGS), p=chance.choice(PLACES), d=day, e=other_day,
        q=chance.choice((10, 20, 25, 30, 40, 50)), m=chance.choice(("twice", "three times", "half", "four times")),
        r=chance.choice(PARTS[:3]), **values,
    )  # fmt: skip


def request(chance: random.Random) -> str:
    """One everyday request."""
    (scene, scene2), (subject, subject2) = chance.sample(SCENES, 2), chance.sample(SUBJECTS, 2)
    role, role2 = chance.sample(ROLES, 2)
    return chance.choice(REQUESTS.splitlines()).format(
        x=scene, x2=scene2, y=subject, y2=subject2, z=chance.choice(PLANS), w=chance.choice(PEOPLE), v=role, v2=role2,
        u=chance.choice(TASKS), a=chance.randint(2, 40), h=chance.randint(50, 200), g=chance.randint(2, 9),
    )  # fmt: skip


def main() -> None:
    """Write the file that is named."""
    chance = random.Random(SEED)
    prompts = {problem(chance) for _ in range(NUM_PROBLEMS)} | {request(chance) for _ in range(NUM_REQUESTS)}
    file = Path(sys.argv[1])
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in sorted(prompts)]
    file.write_text("".join(lines), encoding="utf-8")
    print(f"{file}: {len(lines):,} prompts")


if __name__ == "__main__":
    main()
