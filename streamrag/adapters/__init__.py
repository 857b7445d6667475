"""streamrag in other people's frameworks, and their retrievers as sources: a module for each, and an extra of its name.

Nothing else in streamrag imports these.
"""
