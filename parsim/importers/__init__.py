"""Files of other tools, as profiles, run files and measured timelines. Start reading at `parsim.importers.kinds`.

A reader takes a `SourceFile` and returns plain records, or raises ImportedFileError: with what was expected, what was found and
what to do. Nothing is silently empty, and what was left out is counted.
"""
