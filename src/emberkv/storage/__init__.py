"""The storage room: arena.py decides where bytes lie (pure); dram.py and staging.py map the memory they lie in.

Why it exists: nobody else maps memory or opens a file for blocks.
Laws: reserve -> fill -> commit | abort, one owner of the buffer; memory shared with a process that is not trusted is
sealed, so that it can neither be written through the arena nor pulled away under a reader.
"""
