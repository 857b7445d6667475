"""The same questions with streaming and without, in pairs close in time: how much sooner do their tokens come?"""
