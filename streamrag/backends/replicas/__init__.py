"""Replicas of an engine, for any program that runs them: those of `backends.ray`, and the lanes of `backends.lanes`.

replica_streams ──▶ replica ──▶ an engine        wire has the messages between the two
   │ ticket
replica_chooser ──▶ streamrag.routing
"""
