"""DATA and the product of it: thousands of different questions for a small model, without a data set to fetch."""

from __future__ import annotations

import random

_FORMS = (
    "Explain {} to a child.",
    "Explain {} in two sentences.",
    "What is {}? Keep it short.",
    "Give three tips about {}.",
    "Write a short poem about {}.",
    "Write a very short story about {}.",
    "Why is {} important?",
    "What are common mistakes with {}?",
    "List five facts about {}.",
    "How did {} change over time?",
    "Compare {} today and a hundred years ago.",
    "Give two arguments for {} and two against.",
    "How would you teach {} to a beginner?",
    "Write an email to a friend about {}.",
    "What should everybody know about {}?",
    "Which questions about {} are still open?",
    "Describe {} without using technical words.",
    "What tools do people need for {}?",
    "How much does {} cost, and what decides that?",
    "Suggest a title and a first paragraph for an article about {}.",
    "Who is interested in {}, and why?",
    "How does {} affect the environment?",
    "What is the science behind {}?",
    "Make a plan for a week of learning about {}.",
    "What surprises people most about {}?",
    "Write a dialogue between two neighbours about {}.",
    "How can a school make use of {}?",
    "What are the main parts of {}?",
    "Name four places known for {} and say why.",
    "Which risks come with {}, and how are they made smaller?",
    "Write a short speech about {}.",
    "Summarize the history of {} in a few sentences.",
    "What would the world be without {}?",
    "Write a Python function that has something to do with {}, and explain it.",
    "How do I start with {} at home?",
    "Give a checklist for {}.",
)
_TOPICS = (
    "bread baking, the water cycle, chess, bicycles, beekeeping, the moon, public libraries, coffee, volcanoes, "
    "photosynthesis, sleep, jazz, the printing press, solar power, glaciers, tea, swimming, the stock market, "
    "vaccines, gardening, railways, recursion, the heart, whales, inflation, bridges, pottery, lighthouses, the "
    "Roman Empire, football, databases, migration of birds, chocolate, painting, electric cars, rivers, "
    "insurance, mountains, running, mathematics, sailing, dinosaurs, cheese, elections, robots, the violin, rain "
    "forests, recycling, photography, cats, satellites, wool, the brain, cooking rice, deserts, magnets, poetry, "
    "tides, sorting algorithms, museums, wind turbines, the human eye, translation, snow, black holes, first aid, "
    "maps, coral reefs, bacteria, clocks, theatre, airports, origami, the French Revolution, soil, language "
    "learning, batteries, earthquakes, hiking, opera, fractions, the internet, olive oil, dogs, steam engines, "
    "mushrooms, savings, gravity, wedding customs, camels, compilers, winter, spices, astronomy, carpentry, "
    "tennis, honey, rainbows, encryption, paper, castles, public speaking, yoga, the periodic table, butterflies, "
    "tomatoes, ships, memory, noise, friendship, elephants, concrete, breakfast, penguins, traffic lights, "
    "dreams, taxes, skiing, bamboo, radio, weather forecasts, wine, statistics, the Silk Road, horses, knitting, "
    "antibiotics, waterfalls, folk music, the immune system, comets, architecture, fishing, mirrors, potatoes, "
    "negotiation, ants, space travel, islands, markets, probability, drums, salt, hospitals, the Renaissance, "
    "wolves, bees, cinema, climbing, plastic, apples, debt, ballet, clouds, graph theory, silk, owls, mining, "
    "soup, the atom, dancing, rockets, seeds, tunnels, novels, ice cream, lightning, meditation, glass, spiders, "
    "teamwork, orchestras, canals, the liver, hot air balloons, pasta, sharks, democracy, sand, sleepwalking, "
    "sculpture, perfume, marathon training, gold, version control, carnivals, oaks, juggling, ancient Egypt, "
    "blood, tractors, parks, lemons, sign language, submarines, fairy tales, rubber, fire safety, logic puzzles, "
    "turtles, vinegar, fountains, elevators, winter tyres, the alphabet, dust, jam"
)


def questions(count: int, seed: int) -> list[str]:
    """Different questions, the same ones for the same seed: about one topic each, and where those run out about two.

    Raises:
        ValueError: there are not that many.
    """
    draw = random.Random(seed)
    topics = _TOPICS.split(", ")
    single = [form.format(topic) for form in _FORMS for topic in topics]
    if count <= len(single):
        return draw.sample(single, count)
    pairs = [f"{one} and {other}" for one in topics for other in topics if one < other]
    double = [form.format(pair) for form in _FORMS for pair in pairs]
    found = single + draw.sample(double, count - len(single))
    draw.shuffle(found)
    return found
