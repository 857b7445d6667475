"""Short texts about different things, and a question about each."""

from pathlib import Path

# Title, three sections (heading, text), a question, and the number of the section that answers it.
TOPICS = [
    (
        "Bicycle maintenance",
        ("Chain", "Clean the chain with a degreaser every month, let it dry, and put one drop of oil on each link."),
        ("Tyres", "Inflate tyres to the pressure printed on their side wall; a soft tyre punctures on every kerb."),
        ("Brakes", "Brake pads are worn out when the grooves are gone. Replace both at once and run them in gently."),
        "When do I have to change the brake pads of my bike?",
        2,
    ),
    (
        "Sourdough bread",
        ("Starter", "A starter is flour and water in which wild yeast lives. Feed it daily and keep it warm."),
        ("Kneading", "Stretch and fold the dough four times in the first two hours instead of kneading it."),
        ("Baking", "Bake the loaf in a closed pot at 240 degrees so that steam keeps the crust soft while it rises."),
        "How hot should the oven be for a loaf of bread?",
        2,
    ),
    (
        "The solar system",
        ("Jupiter", "Jupiter is the largest planet, a gas giant with a red storm wider than the Earth."),
        ("Saturn", "The rings of Saturn are made of ice and rock, from grains of dust to blocks like houses."),
        ("Mars", "Iron oxide in its dust makes Mars red. Olympus Mons is the highest volcano that is known."),
        "What are the rings around a planet made of?",
        1,
    ),
    (
        "Chess",
        ("Castling", "Castling moves king and rook at once, if neither has moved and no square between is attacked."),
        ("En passant", "A pawn that advances two squares may be captured as if it had moved only one."),
        ("Stalemate", "A player who is not in check and has no legal move is stalemated, and the game is drawn."),
        "What happens if I cannot move any piece but am not in check?",
        2,
    ),
    (
        "Coffee",
        ("Grinding", "Espresso wants a fine grind, a French press a coarse one, and filter coffee one in between."),
        ("Roasting", "Dark roasts taste of chocolate and smoke; light roasts keep the acids and fruit of the bean."),
        ("Caffeine", "A cup of filter coffee has about ninety milligrams of caffeine, more than an espresso."),
        "How much caffeine is in a cup?",
        2,
    ),
    (
        "Task groups",
        ("Starting", "An async task group starts child tasks and waits for all of them when its block ends."),
        ("Cancellation", "Cancel the scope of a task group to stop its children; each gets a cancellation exception."),
        ("Errors", "If a child raises, the others are cancelled and the errors come out as an exception group."),
        "How do I stop all concurrent children in Python?",
        1,
    ),
    (
        "Tomatoes",
        ("Sowing", "Sow tomato seeds indoors eight weeks before the last frost, in pots on a sunny window sill."),
        ("Watering", "Water tomatoes at the root in the morning; wet leaves invite blight."),
        ("Pruning", "Pinch out the side shoots that grow between stem and leaf so that the plant makes fruit."),
        "Which shoots of the plant should be removed?",
        2,
    ),
    (
        "Volcanoes",
        ("Magma", "Magma that is rich in silica is viscous and traps gas, which makes eruptions explosive."),
        ("Ash", "Volcanic ash stops jet engines, because it melts in them; aircraft are diverted around it."),
        ("Monitoring", "Swarms of small earthquakes and bulging ground announce an eruption days before it comes."),
        "Why are flights cancelled after an eruption?",
        1,
    ),
    (
        "Violins",
        ("Strings", "The four strings of a violin are tuned in fifths: G, D, A and E."),
        ("Bow", "Rosin on the horse hair of the bow makes it grip the string; without it there is no sound."),
        ("Varnish", "The varnish of Stradivari has been analysed often, and nobody has shown that it is a secret."),
        "Which notes do I tune the instrument to?",
        0,
    ),
    (
        "Vaccines",
        ("Memory", "A vaccine shows the immune system a harmless piece of a germ, and memory cells remember it."),
        ("mRNA", "An mRNA vaccine carries the recipe of one protein, and our own cells make it for some days."),
        (
            "Herd immunity",
            "When enough people are immune an outbreak dies out and protects those who cannot be vaccinated.",
        ),
        "How are people protected who cannot get the shot?",
        2,
    ),
]


def write_topics(folder: Path) -> None:
    """Each topic a page, by turns HTML and Markdown; each section is long enough to be a passage of its own."""
    folder.mkdir()
    for number, (title, *sections, _, _) in enumerate(TOPICS):
        if number % 2:
            body = "".join(f"\n## {heading}\n\n{text}\n" for heading, text in sections)
            (folder / f"{number}.md").write_text(f"# {title}\n{body}")
        else:
            body = "".join(f"<h2>{heading}</h2><p>{text}</p>" for heading, text in sections)
            (folder / f"{number}.html").write_text(f"<title>{title}</title><nav>Home</nav><main>{body}</main>")
