"""Looking at what a run did: its episodes, groups, rewards and training. Reads runs, datasets of ours and
LeRobotDatasets; changes nothing.

    source = open_source(Path("runs/tabletop_reach-seed0"))
    rows = Filter.parse("success:no reward:0.5..").rows(source.table)      # the reward was fooled
    group = load_group(source, source.table.id[rows[0]])                   # G episodes from the identical start
    export(source, rows, Path("fooled.mp4"))
"""

from vla_rlaif.inspect.export import export
from vla_rlaif.inspect.filters import Filter, ordered
from vla_rlaif.inspect.library import Library, open_run, open_source
from vla_rlaif.inspect.run import Run
from vla_rlaif.inspect.source import Episode, Numbers, Source, load_episode, load_group
from vla_rlaif.inspect.table import EpisodeTable

__all__ = [
    "Episode",
    "EpisodeTable",
    "Filter",
    "Library",
    "Numbers",
    "Run",
    "Source",
    "export",
    "load_episode",
    "load_group",
    "open_run",
    "open_source",
    "ordered",
]
