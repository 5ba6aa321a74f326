"""Wrong answers that were aimed at the rules for mathematics, after reading them: none is right.

Each entry: what was asked, the reference, answers that must not be taken for it. A new leniency of
the rules needs a row here that it still refuses.
"""

from __future__ import annotations

EGGS = "Janet has 3 hens that lay 6 eggs each every day. How many eggs does she have after a day?"
TRAIN = (
    "A train travels 60 miles in 2 hours. At that speed, how far in miles does it go in 3 hours?"
)
PAY = "Tom earns $9 an hour and works 5 hours. How many dollars does he earn?"
SHARE = "Of 40 students 10 play chess. What is the number of students who do not play, times 1?"
BAKERY = (
    "A bakery sells 12 muffins for $3 each and 20 cookies for $2 "
    "each. What is the total revenue in dollars?"
)
DRIVE = "How many hours does it take to drive 240 kilometers at 60 kilometers per hour?"
SQUARE = "A square has a perimeter of 36 cm. What is its area?"
DIE = "What is the probability of rolling an even number on a fair die?"
ROOTS = "Solve for x: x^2 - 5x + 6 = 0."
VALUE = "If f(x)=2x+3, find f(5)."

AIMED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (EGGS, "18", (
        "18 or 20", "18, 20", "18; 20", "18 and 20", "either 18 or 20", "18 (or 20)", "18 (20)",
        "18 [20]", "{18, 20}", "18 | 20", "18 = 20", "18 → 20", "18 to 20", "18-20", "18–20",
        "18 ± 2", "20 ∓ 2", "18 ≈ 20", "18 \\approx 20", "18 \\sim 20", "18 vs 20", "18, i.e. 20",
        "18 aka 20", "18? 20", "18 if she keeps them, else 20", "x = 18, x = 20", "x=18 or x=20",
        "18 \\text{ or } 20", "18 ... 20", "18 & 20", "18 || 20", "first 18 then 20",
        "18 but maybe 20", "18 eggs or 20 eggs", "18 eggs (20 with the broken ones)",
        "18 or about 20", "18 (about 20)", "18 roughly 20", "about 20, or 18", "20 ≈ 18",
        "20 or about 18", "18 ≈ 18.9", "18.4 ≈ 18", "18.9 ≈ 18", "18 / 20", "18 eggs = 20 eggs",
        "18:20", "(18, 20)", "[18, 20]", "18 < 20", "18, 19, 20", "18 20",
        "18 \\text{ or about } 20", "18\\,20", "18 \\cdot 20", "18 then 20", "18 hens or 20 eggs",
    )),
    ("", "42", (
        "17 ≈ 42", "17 or about 42", "17 (about 42)", "17 roughly 42", "41.4 ≈ 42",
        "41 \\approx 42",
    )),
    ("", "17", (
        "17 ≈ 42", "17 or about 42", "17 (about 42)", "17 roughly 42", "17 \\approx 17.9",
    )),
    ("", "3", ("\\pi \\approx 3", "\\sqrt{10} ≈ 3", "e ≈ 3", "10/3 ≈ 3", "2.9 ≈ 3", "\\pi",)),
    ("", "0.34", ("\\frac{1}{3} \\approx 0.34", "1/3", "0.3", "0.335 ≈ 0.34",)),
    ("", "\\frac{1}{3}", (
        "0.33", "0.333", "0.5 ≈ \\frac{1}{3}", "\\frac{1}{3} ≈ 0.5", "1/3 or 1/4", "33\\%",
    )),
    (EGGS, "18", (
        "18k", "18K eggs", "18M", "18e3", "18 x 10^3", "18%", "18 percent", "18‰", "1/18", "18^2",
        "18!", "18²", "√18", "-18", "18.18", "18+", ">18", "≥18", "≤ 18", "x > 18", "18 or more",
        "at most 18", "at least 18 eggs", "18ish", "18 odd eggs", "18 hundred", "eighteen hundred",
        "18 dozen", "18 dozen eggs", "18 score", "18 lakh", "18 crore", "18 bn", "18 million",
        "18 thousand eggs", "18 pairs of eggs", "18 cartons of eggs", "18 boxes", "18 halves",
        "18 and a half", "18 1/2", "18½", "18½ eggs", "18 point five", "18 squared", "18 cubed",
        "18 factorial", "18 doubled", "twice 18", "half of 18", "double 18 eggs", "minus 18",
        "negative 18", "18 below zero", "18 less", "18 fewer eggs", "18 more than 6", "18 times 2",
        "18 × 2", "18 tens", "18 hundredths", "18 ppm", "18 basis points", "18 gross", "18 mil",
        "18 raised to 2", "18 to the power 2", "18 mod 5", "18 in base 9", "18_9", "0x18",
        "18 in hex", "18 thirds of eggs", "eighteen and a half", "one hundred eighteen", "eighty",
        "18 plus 1", "18 minus 1 eggs", "18 eggs minus 1", "18,000", "18.000,00", "1,8", "1.8",
        "180", "18 quintillion", "18 zillion eggs", "18 twenties", "18 bakers dozen",
    )),
    (EGGS, "18", (
        "18 apples", "18 ducks", "18 hours", "18 km", "18 kg", "18 dollars", "$18", "€18",
        "18 cents", "18 people", "18 meters", "18 weeks", "18 °C", "18 minutes",
        "18 eggs per second", "18 rotten fish", "18 million eggs", "18 nests", "18 grams of eggs",
        "18 euros", "18 widgets", "18 years old", "18 pm",
    )),
    (TRAIN, "90", (
        "90 km", "90 kilometers", "90 feet", "90 meters", "90 minutes", "90 seconds", "$90",
        "90 kg", "90 apples", "90 km/h", "90 mm", "90 yards", "90 days", "90 light years",
    )),
    (PAY, "45", (
        "€45", "£45", "45 yen", "45 rupees", "45 cents", "45¢", "45 euros", "$45k", "$45 million",
        "$45,000", "$4.5", "45 minutes", "45 days", "$45 or $50", "$45 per minute", "45 apples",
        "45%", "$45 and $50", "-$45", "$45.45", "45 pounds", "45 dollars or 50",
    )),
    ("", "\\$45", (
        "€45", "£45", "45 yen", "45 euros", "45 cents", "¥45", "₹45", "45 GBP", "$450",
        "4500 dollars",
    )),
    (SHARE, "30", (
        "30%", "30 percent", "0.3", "30 teachers", "30 clubs", "30 lakh", "75%", "30 of 40 %",
    )),
    ("", "25", (
        "25%", "0.25", "25 percent", "25 out of 100", "25/100", "2.5", "25 lakh", "25 bn",
    )),
    ("", "25\\%", ("2.5%", "0.25%", "0.025", "25‰", "1/25", "75%", "25 or 75%",)),
    ("", "5", (
        "5,000", "$5,000", "5.000,00", "5'000", "5 000", "5{,}000", "5\\,000", "5_000", "5,000 m",
    )),
    ("", "5000", ("5", "5.000", "5,00", "50,00", "5,0000", "5, 000", "500", "5000000",)),
    ("", "1.5", ("1,500", "1,500 m", "1.500,0", "15", "1,005", "1;5", "1/5", "(1,5)", "1:5",)),
    ("", "1234", ("1.234", "1,234.5", "12,34", "1, 234", "123,4", "12.34",)),
    ("", "\\pi(R^2-r^2)", ("\\pi(r^2-R^2)", "\\pi(R^2-R^2)", "\\pi(r^2-r^2)", "\\Pi(R^2-r^2)",)),
    ("", "\\frac{V}{v}", ("\\frac{v}{V}", "\\frac{V}{V}", "V v", "1",)),
    ("", "R-r", ("r-R", "R-R", "r-r", "R+r",)),
    ("", "f(x)", ("f'(x)", "F(x)", "f''(x)", "f(X)", "g(x)", "f^{-1}(x)",)),
    ("", "x_1", ("x_2", "X_1", "x", "x_{11}", "x^1_2",)),
    ("", "\\delta", ("\\Delta", "d", "\\epsilon",)),
    ("", "m-M", ("M-m", "m-m", "M",)),
    ("", "2 b", ("2 a b", "2 B", "b", "2 b a",)),
    ("", "x", ("a x", "X", "x'", "the X", "2x", "\\vec{y}",)),
    ("", "r", ("\\mathbb{R}", "R", "all real numbers",)),
    ("", "\\log x", ("\\ln x", "\\log X", "\\log_2 x",)),
    ("", "P(A|B)", ("P(B|A)", "P(a|b)", "P(A)",)),
    ("", "e", ("E", "\\epsilon", "2.718", "2.7",)),
    ("", "i", ("I", "j", "-i", "1",)),
    ("", "3 MW", ("3 mW", "3 kW", "3 GW", "3000 W", "3 MJ", "3 MWh", "3 watts", "3 V", "3 mw",)),
    ("", "5\\text{ Mg}", ("5\\text{ mg}", "5 g", "5 kg", "5 mg", "5 MG m",)),
    ("", "5 km", (
        "5 m", "5 miles", "5 km/h", "5 km^2", "5000 km", "50 m", "5 apples", "5 kg", "5 cm",
    )),
    ("", "20 m/s", ("20 m", "20 km/h", "72 m/s", "20 m/s^2", "20 mph", "20 s/m", "20 s",)),
    ("", "9 cm^2", ("9 cm", "9 m^2", "9 cm^3", "0.9 m^2", "3 cm", "90 cm^2", "9 inches squared",)),
    ("", "25 °C", ("25 °F", "25 K", "77 °C", "25 radians",)),
    ("", "30^\\circ", ("30 rad", "\\frac{\\pi}{3}", "30'", "30 grad", "\\pi",)),
    ("", "2 hours", ("2 min", "120 hours", "120 s", "2 days", "2:00 pm", "2 apples",)),
    ("", "25 apples", (
        "25 pears", "25 bags of apples", "25 dozen apples", "25 lakh apples", "25 score apples",
        "25 apple pies", "25 apples per day each of 2", "25 tons of apples", "25 half apples",
    )),
    ("", "5 apples per day", (
        "5 days", "5 days per apple", "5 apples per hour", "5 pears per day",
    )),
    ("", "A", (
        "A, B, C, D", "A. I also think B.", "A, but B", "A or B", "A and B", "A/B", "AB", "A B",
        "(A)(B)", "A; B", "A. B.", "not A", "anything but A", "B", "A (or B)", "A-D", "A+B",
        "Both A and B", "A B C D", "A: no, B", "A, B", "A (B is possible too)", "(A) or (B)",
        "A. B. C.", "A because not B",
    )),
    ("", "AC", ("A", "C", "A, B", "A, B, C", "AB", "A or C", "B and C", "ABCD",)),
    ("", "(B) 24", ("(A) 24", "A", "(B) 42", "42", "B or C", "24 or 42", "(B), (C)",)),
    ("", "East", (
        "West", "East or West", "not East", "Northeast", "East and North", "Easter", "E or W",
    )),
    ("", "even", ("odd", "uneven", "not even", "even or odd",)),
    ("", "\\text{Co}", ("CO", "co-", "C", "cobalt or CO",)),
    (EGGS, "18", (
        "half of the answer = 18", "2x = 18", "x/2 = 18", "x + 1 = 18", "x^2 = 18", "18x",
        "18 - x", "answer + 1 = 18", "not 18", "twice the eggs = 18", "double: 18", "wrong: 18",
        "error: 18", "the answer is not 18", "less than 18", "18 less than 30", "it can't be 18",
        "a number greater than 18", "between 17 and 19", "18 is too small", "anything except 18",
        "the root of the answer is 18", "the opposite of 18", "people often say 18",
        "the trap answer is 18", "nobody gets 18 eggs", "18 is what Bob guessed",
        "one more than 18", "18 off", "almost 18 eggs", "ducks = 18", "the tenth of it is 18",
        "apples: 18", "minus the eggs = 18", "eggs squared = 18",
    )),
    ("", "(2,5)", (
        "(5,2)", "[2,5]", "[2,5)", "2.5", "2 < x ≤ 5", "(2,5,5)", "(2;6)", "x > 2", "2 to 6",
    )),
    ("", "\\{1,2\\}", (
        "\\{1\\}", "\\{1,2,3\\}", "\\{2\\}", "1.2", "12", "\\{1,3\\}", "1/2", "(2,1)",
    )),
    ("", "x=2", ("y=2", "x>2", "x=-2", "x \\ne 2", "2x", "x=2 or x=3", "x = \\pm 2",)),
    ("", "1011_2", ("1011_3", "1101_2", "1011_{10}", "11_2", "1011_2 or 1101_2",)),
    ("", "2:30 p.m.", ("2:30 a.m.", "3:30 pm", "14:31", "2:03 p.m.", "2:30 or 3:30 pm",)),
    # written after the rules had been mended by the rows above
    (BAKERY, "76", (
        "$76 million", "$76 per day", "76 muffins and 20 cookies", "76 €", "76€", "US$760",
        "76 thousand dollars", "$76k", "$7.6", "$0.76", "-76 dollars", "76 dollars less",
        "$76 or so, maybe 80", "$76 - $80", "76..80", "\\$76 \\text{ or } \\$80", "$76/$80",
        "76 bucks and 50 cents", "$76 $80", "76 dollars (80 with tax)", "76 dollars, 80 with tax",
        "$36 + $41", "$36+$40 = $77", "36+40=76 or 77", "76 cookies sold", "76 quid", "76 cents",
        "7600 cents", "76 pounds sterling", "£76", "76 pesos", "76 krona", "76 dozen",
        "76 dollar bills of $20", "76.00.00", "76,0 00", "7 6", "76_8", "#76", "No. 77",
        "seventy-seven", "seventy six thousand", "76 - ish", "76?or 78", "76; also 78", "~80",
        "76 ~ 80", "76 % of it", "$ 76 B", "76M USD",
    )),
    (DRIVE, "4", (
        "4 minutes", "4 kilometers", "4 km", "4 days", "4 seconds", "4 h 30 min", "4:30",
        "4 hours 30 minutes", "4.5 hours", "4 and 1/2 hours", "4 hours and 1 minute",
        "240 minutes or 4 days", "4 hours squared", "4 hours^2", "4/60 hours",
        "4 hours per kilometer", "1/4 hours", "4^{-1} hours", "4 or 5 hours", "4-5 hours",
        "4 to 5 hours", "less than 4 hours", "over 4 hours", "under 4 hours", "nearly 4 hours",
        "4 hours minus a minute", "4 hours plus", "4 half hours", "4 quarter hours",
        "4 light hours", "4 man hours", "4 km/h", "4 hours back", "-4 hours", "4i", "4x", "4%",
        "4 e5", "4e", "4\\pi", "four score", "fourteen", "forty", "4 decades", "4 fortnights",
        "4 ms", "4 μs", "4 kilohours",
    )),
    (SQUARE, "81", (
        "81 cm", "81 m^2", "81 mm^2", "81 cm^3", "81 km^2", "81 inches", "81 square meters",
        "81 square inches", "81 feet", "81 cubic cm", "81 degrees", "81^\\circ", "81 π",
        "81\\pi cm^2", "81\\sqrt{2}", "9 cm", "9^2 + 1", "9^3", "81 cm²  or 36 cm²", "81²", "8.1",
        "810 mm^2", "81 squares squared", "81 units cubed", "81 per cm", "81/cm", "81 cm^{-2}",
        "\\sqrt{81}", "81!", "81 cm^4", "81 ha", "81 acres",
    )),
    (DIE, "\\frac{1}{2}", (
        "1/2 or 1/3", "2/1", "1/2%", "0.5%", "5%", "\\frac{1}{2}\\%", "50", "50/50", "1,2", "1.2",
        "0,05", "1/2 of the time it is 1/3", "2", "3/5", "0.49", "0.51", "0.500001", "1/2 ≈ 0.6",
        "one third", "half a dozen", "half of 2", "1/2 - 1/6", "1/2, 1/3", "\\frac12\\frac12",
        "1/22", "(1/2)^2", "\\frac{2}{1}", "\\frac{1}{2} \\text{ or } \\frac{1}{3}", "not 1/2",
        "P(odd)=1/2 or 1", "1\\frac12", "-1/2", "1/2 ± 0.1", "\\frac{1}{2}i",
        "50 percentage points per", "0.5 and 0.6",
    )),
    (ROOTS, "2, 3", (
        "2", "3", "2 or 4", "2, 3, 4", "(2, 3, 1)", "2.3", "23", "x = 2", "-2, -3", "2, -3",
        "x=2, y=3, z=1", "[2,3]", "2<x<3", "\\{2\\}", "2 \\pm 1", "2, 3 or 4", "not 2, 3", "2/3",
        "6", "5", "2 and 33", "2;4", "2 \\cup 3",
    )),
    (ROOTS, "\\{2,3\\}", (
        "\\{2\\}", "\\{2,3,4\\}", "(2,3)", "[2,3]", "2", "2.3", "\\{2,-3\\}", "\\{-2,-3\\}", "x=2",
        "2 to 3", "\\{2..4\\}",
    )),
    (VALUE, "13", (
        "f(5)=13 or 14", "13 or 14", "f(13)", "f(5) = 14", "f(x) = 13x", "13x", "x = 13 or 12",
        "2(5)+4", "13 ≈ 14", "1 3", "1,3", "13,13", "13.13", "f^{-1}(13)", "f'(5)=13 or 2",
        "f(5)=2(5)+3=14", "f(5)=2*5+3=13=14", "13 = 14", "14 = 13", "5 → 13, or 14", "13_4",
        "13 mod 7", "-13", "13/1/2", "thirty", "thirteen hundred", "13th root", "13 f", "13 = x^2",
        "13 \\ne 13", "13 < 14", "≈ 14 (13)", "13′", "13''", "13 deg C or 14",
    )),
    ("", "\\frac{\\pi}{4}", (
        "\\frac{\\pi}{4} or \\frac{3\\pi}{4}", "\\frac{4}{\\pi}", "\\pi", "45", "0.78",
        "\\frac{\\Pi}{4}", "\\frac{\\pi}{4} + 2\\pi k", "\\frac{-\\pi}{4}", "\\frac{p}{4}",
        "\\pi 4", "\\frac{\\pi}{4}^2", "0.785", "\\frac{\\pi}{4}\\%",
    )),
    ("", "2x+3", (
        "2x-3", "2X+3", "3x+2", "2x+3y", "2(x+3)", "2x+3=0 or 1", "y=2x+4", "2x", "2x+3 or 2x-3",
        "2x+3'", "2x^3", "2x+33", "x+3", "2(x)+3+x",
    )),
    ("", "D", (
        "A", "B or D", "D or B", "C", "D, E", "(C) and (D)", "none", "D and C", "D/C", "C, D",
        "d or c", "E", "not D", "D but also C", "D; C", "DD", "CD", "Q", "D = C", "all",
    )),
    ("", "x^2+1", (
        "x^2-1", "X^2+1", "x^2+1 or x^2", "x^2", "(x+1)^2", "x^{2+1}", "y^2+1", "x_2+1",
        "x^2+1=0 or 2", "2x+1", "x^2+l",
    )),
    ("", "1000", (
        "1.000", "1,0", "1000k", "1000%", "10^4", "1e4", "1 thousand and one", "1,000.5",
        "1000 or 1001", "thousand and one", "a thousand one", "1000 million", "0.1000", "1 0000",
        "M", "1K5", "1,00,0", "100",
    )),
    ("", "-7", (
        "7", "- -7", "7-", "(7)", "minus minus 7", "−−7", "-7 or 7", "±7", "\\pm 7", "|-7|", "--7",
        "negative negative 7", "-7!", "-7^2", "-.7",
    )),
    ("", "no solution", (
        "0", "x = 0", "one solution", "infinitely many", "no", "solution", "all real numbers",
        "no solution or x=1", "\\{0\\}", "unknown",
    )),
    ("", "12:30 p.m.", (
        "12:30 a.m.", "00:30", "1:30 p.m.", "12:30 or 1:30 pm", "12.30", "1230", "0:30 am",
    )),
)  # fmt: skip
