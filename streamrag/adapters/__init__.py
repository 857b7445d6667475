"""streamrag in other people's frameworks, and their retrievers as sources: a module and an extra for each.

Nothing else in streamrag imports these.
"""
