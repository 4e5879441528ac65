"""The page at `/`: what the engine does and what the cache holds, live, and a chat box.

files.py         the page itself, which holds no data and therefore needs no API key
encode.py        views of the engine as events: all of it, or what has changed
cache_events.py  what was stored in and removed from the prefix tree
hub.py           one source of events for all watchers
routes.py        /, /page/… and /kv/stream
"""
