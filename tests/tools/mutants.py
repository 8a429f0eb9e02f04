"""Break the engine on purpose, many times: do its tests notice?

    python tests/tools/mutants.py             # all of them
    python tests/tools/mutants.py guess       # those whose name has "guess" in it

Works on copies in a temporary folder; the real files are only read. A text to be replaced that is
not found exactly once is an error: the list has to follow the code.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SENT = """        for j in absent:
            # from where it was made; else from any device that holds it, the host, or the disk;
            # where devices read the host's memory, what is not in it is on the disk
            src = max(where[j])
            if self.shared:
                src = DISK
            elif self.place[j] in where[j]:
                src = self.place[j]
            self._send(j, src, memory, out)
"""
LAUNCHED = """        # copies into a device are in its queue, but not those from the disk
        ahead = self.ahead and not self.aside[i]
        if not missing or (ahead and all(coming[j, memory] != DISK for j in missing)):
            self._launch(i, out)
"""
LAUNCHED_LATE = """        if self.ahead:
            pass
        elif not missing:
            self._launch(i, out)
"""

#: name: (what is replaced, by what); the text must occur once.
#:
#: Not here, for nothing can tell them from the original: `_is_queued` without `launched` (a step is
#: ready only once its inputs here are launched); `_done` delivering what is on its way already (a
#: step is pinned until it is done, so it never is); `_copied` keeping an evicted value on its
#: device (the host has it, so the next need drops it first); and `_advance` without its look at
#: `missing` (what a step at the top of the heap misses would be above it, or launched already).
MUTANTS = {
    # launching
    "readers on other devices are not woken": (
        "if not ahead or where[r] != place or aside[r]:",
        "if not ahead or aside[r]:",
    ),
    "readers here are woken at Issued too": (
        "if not ahead or where[r] != place or aside[r]:",
        "if True:",
    ),
    "ahead on a pool of threads": (
        "        if self.ahead and not self.aside[i]:\n            for r in self.readers[i]:",
        "        if not self.aside[i]:\n            for r in self.readers[i]:",
    ),
    "without ahead, launched before its inputs came": (
        "if not missing or (ahead and all(coming[j, memory] != DISK for j in missing)):",
        "if not missing or all(coming[j, memory] != DISK for j in missing):",
    ),
    "ahead, launched when its inputs came": (
        "if not missing or (ahead and all(coming[j, memory] != DISK for j in missing)):",
        "if not missing:",
    ),
    "ahead, launched before the disk is read": (
        "if not missing or (ahead and all(coming[j, memory] != DISK for j in missing)):",
        "if not missing or ahead:",
    ),
    "launched before the copies that it needs are sent": (
        SENT + LAUNCHED,
        "        if self.ahead:\n            self._launch(i, out)\n" + SENT + LAUNCHED_LATE,
    ),
    "window ignored": (
        "if busy[d] >= self.window and not self._fits_deep(i, d):",
        "if False:",
    ),
    "deep window for all": (
        "if busy[d] >= self.window and not self._fits_deep(i, d):",
        "if busy[d] >= self.deep_window:",
    ),
    "deep window for none": (
        "if busy[d] >= self.window and not self._fits_deep(i, d):",
        "if busy[d] >= self.window:",
    ),
    "the deep window has no end": ("if self.busy[d] >= self.deep_window:", "if False:"),
    "guesses open the deep window": ("if self.guess[i] and seen is None:", "if False:"),
    "nothing opens the deep window for guesses": (
        "if self.guess[i] and seen is None:",
        "if self.guess[i]:",
    ),
    "what its kind has made says nothing": ("max(self.nbytes[i], seen or 0)", "self.nbytes[i]"),
    "what its kind has made is not in the window": (
        "self.bytes[i] = max(need, self.seen.get(self.kind[i], 0))",
        "self.bytes[i] = need",
    ),
    "the last value of a kind stands for the next": (
        "if nbytes > self.seen.get(kind, -1):",
        "if True:",
    ),
    "what is fetched is not in the window": (" + fetched <= self.share[d]", " <= self.share[d]"),
    "a full window is too full": (" + fetched <= self.share[d]", " + fetched < self.share[d]"),
    "steps that are done stay in the window": (
        "        self.flight[place] -= self.bytes[i]\n",
        "",
    ),
    "steps that were refused stay in the window": (
        "        self.flight[d] -= self.bytes[i]\n",
        "",
    ),
    # memory
    "inputs not pinned": ("            pins[j] += 1  # or", "            pins[j] += 0  # or"),
    "value not pinned while it is made": ("        pins[i] += 1\n", ""),
    "copy source not pinned": (
        "        self.pins[src][i] += 1\n        self.coming",
        "        self.coming",
    ),
    "room for the value not reserved": (
        "        self._use(memory, self.nbytes[i])\n        self.busy[d] += 1",
        "        self.busy[d] += 1",
    ),
    "room for absent inputs not reserved": (
        "        for j in absent:\n            need += self.nbytes[j]\n",
        "",
    ),
    "half a reservation is kept": (
        "                pins[j] -= 1\n            return False",
        "                pins[j] -= 0\n            return False",
    ),
    "frees outputs": ("        if i in self.keep:\n", "        if False:\n"),
    "frees outputs that are read": ("if left or j in keep:", "if left:"),
    "never frees": (
        "            if not self.pins[p][i]:\n                self._free(i, p, out)\n",
        "            pass\n",
    ),
    "frees only one replica": (
        "for p in sorted(places) if len(places) > 1 else tuple(places):",
        "for p in sorted(places)[:1]:",
    ),
    "evicts what is needed next": ("return -use, -places, -i", "return use, -places, -i"),
    "evicts the oldest": ("return -use, -places, -i", "return 0, 0, -i"),
    "evicts what is nowhere else as soon as what is": (
        "return -use, -places, -i",
        "return -use, 0, -i",
    ),
    "evicts for more than a few steps at once": (
        "elif full and self.busy[d] and self.flight[d] + need > self.tight[d]:",
        "elif False:",
    ),
    "evicts for one step at a time": (
        "self.flight[d] + need > self.tight[d]:",
        "True:",
    ),
    "evicts more than is needed": (
        "            if room >= need:\n                return\n\n",
        "\n",
    ),
    "room to come is not counted": (
        "            if dst < 0 and src == memory and pins[i] == 1",
        "            if False",
    ),
    "replicas are copied to the host": (
        "        if len(where) > 1 and not (self.shared and DISK not in where):",
        "        if self.shared and DISK in where:",
    ),
    "copies come from anywhere": (
        "            elif self.place[j] in where[j]:\n                src = self.place[j]\n",
        "",
    ),
    "copies come from the host first": (
        "            elif self.place[j] in where[j]:\n                src = self.place[j]\n",
        "            else:\n                src = min(where[j])\n",
    ),
    "a value on its way is sent again": (
        "absent = [j for j in missing if (j, memory) not in coming] if missing else missing",
        "absent = missing",
    ),
    # values of the graph
    "values of the graph are launched": ("if not n and i not in self.given:", "if not n:"),
    "values of the graph are not counted": (
        "            self._use(place, self._counted_bytes(i, place))\n        for r",
        "        for r",
    ),
    "values of the graph are not found": (
        "            self.missing[r] -= 1\n\n    def handle",
        "            pass\n\n    def handle",
    ),
    "values of the graph are let go of": (
        "self.keep = self.given.union(plan.outputs)",
        "self.keep = set(plan.outputs)",
    ),
    "values of the graph are evicted": (
        "return not own and self._counted_bytes(i, memory) > 0",
        "return self._counted_bytes(i, memory) > 0",
    ),
    "replicas of values of the graph are not evicted": (
        "own = i in self.fixed and self.memory[self.place[i]] == memory",
        "own = i in self.fixed",
    ),
    "persisted chunks stay where they are": (
        "self.fixed = self.given.difference(plan.there)",
        "self.fixed = set(self.given)",
    ),
    "persisted chunks are all at home": (
        "self.where[i] = self.plan.there.get(i) or {self.memory[self.place[i]]}",
        "self.where[i] = {self.memory[self.place[i]]}",
    ),
    # files
    "what reads a file is in the queue": (
        "        ahead = self.ahead and not aside[i]\n",
        "        ahead = self.ahead\n",
    ),
    "readers are launched behind what reads a file": (
        "        if self.ahead and not self.aside[i]:\n            for r in self.readers[i]:",
        "        if self.ahead:\n            for r in self.readers[i]:",
    ),
    "what writes a file is launched behind what it reads": (
        "if self.place[r] == d and not self.aside[r]:",
        "if self.place[r] == d:",
    ),
    "what writes a file is launched before its copies have come": (
        "        ahead = self.ahead and not self.aside[i]\n        if not missing",
        "        ahead = self.ahead\n        if not missing",
    ),
    "what was read from a file is not there any more": (
        "        if self.again[i]:  # it is where it was read, too\n",
        "        if False:\n",
    ),
    "files that are read take room": (
        "        if place == DISK and self.again[i]:\n            return 0\n",
        "",
    ),
    "reading ahead fills the memory": (
        "if early and self.busy[d] and self.used[memory] + need > int(AHEAD * limit):",
        "if False:",
    ),
    "reading ahead stops where a part of the memory is full": (
        "if early and self.busy[d] and self.used[memory] + need > int(AHEAD * limit):",
        "if early and self.used[memory] + need > int(AHEAD * limit):",
    ),
    "reading ahead sends anything away": (
        "after = self._next_use(i, memory) if early else -1",
        "after = -1",
    ),
    "reading sends nothing away": (
        "        return not self.plan.steps[i].inputs and not self.is_quiet\n",
        "        return not self.plan.steps[i].inputs\n",
    ),
    "a guess counts on the room of values of the graph": (
        "stays = self._immovable_steps(memory).union(inputs)",
        "stays = set(inputs)",
    ),
    # delivery
    "results are not delivered": (
        "if i in self.plan.deliver and HOST not in self.where[i]",
        "if False and HOST not in self.where[i]",
    ),
    "a delivered value leaves though it is read": (
        "still_read = dst == HOST and i in self.plan.deliver and self.unread[i]",
        "still_read = False",
    ),
    "a delivered value never leaves": (
        "            if HOST in self.where[i] and i in self.plan.deliver and place >= 0:",
        "            if False:",
    ),
    # refusals
    "NoRoom forgets the true size": (
        "            self.nbytes[i] = event.nbytes\n            self.guess",
        "            self.guess",
    ),
    "NoRoom leaves a guess a guess": (
        "event.nbytes\n            self.guess[i] = False",
        "event.nbytes",
    ),
    "NoRoom keeps the reservation": (
        "        self._use(memory, -self.nbytes[i])\n        self.busy[d] -= 1",
        "        self.busy[d] -= 1",
    ),
    "NoRoom of a copy keeps its room": (
        "            self._use(place, -self._counted_bytes(i, place))\n",
        "",
    ),
    "NoRoom of a copy keeps its source pinned": (
        "                self.stays.add(i)\n            self._unpin(i, src, out)",
        "                self.stays.add(i)",
    ),
    "those that waited for a refused copy wait on": (
        "                self._unreserve(r, out)\n                self._give_turn_alone(r, 0)\n",
        "                pass\n",
    ),
    "who steps back is waited with all the same": (
        "                if i in waiting:\n                    waiting.remove(i)\n",
        "                pass\n",
    ),
    "readers queued behind a refused launch not recalled": (
        "                self.missing[r] += 1  # it",
        "                self.missing[r] += 0  # it",
    ),
    "recalled readers are woken while launched": (
        "if not self.missing[r] and not self.launched[r]:",
        "if not self.missing[r]:",
    ),
    "true sizes are not learned": (
        "            self._use(memory, extra)\n",
        "            pass\n",
    ),
    "who is refused again is only tried again": (
        "        if refused <= patience:\n            return\n",
        "        if True:\n            return\n",
    ),
    "who is refused has no patience": ("if refused <= patience:", "if False:"),
    "who is refused has patience for ever": ("if refused > 2 * patience:", "if False:"),
    "to be refused because of others counts as much": (
        "patience = 1 if nbytes else PATIENCE",
        "patience = 1",
    ),
    "a copy that has come makes no room": (
        "        self.touched |= self.thirsty\n        for r in self.awaited",
        "        for r in self.awaited",
    ),
    # the host, the disk, and memory that is shared
    "the host has no limit": (
        "return self.used[HOST] + self.nbytes[i] - self.limit[HOST]",
        "return -1",
    ),
    "the host never lets go for what is needed sooner": (
        "if not bound and self._next_use(j, HOST) <= mine:",
        "if not bound:",
    ),
    "the host lets go for what is needed later": (
        "if not bound and self._next_use(j, HOST) <= mine:",
        "if False:",
    ),
    "what stays because it must lets nobody leave": (
        "if not bound and self._next_use(j, HOST) <= mine:",
        "if self._next_use(j, HOST) <= mine:",
    ),
    "the host lets too much go": (
        "            if short <= 0:\n                break\n",
        "",
    ),
    "the host keeps what is on a device, too": (
        "return -places, -use, -i",
        "return -use, -places, -i",
    ),
    "room that the host will have is not counted": (
        "short = self._host_deficit(i) - self._bytes_leaving(HOST)",
        "short = self._host_deficit(i)",
    ),
    "a value is sent to the host before there is room": (
        "if refuge != HOST or self._host_deficit(i) <= 0:",
        "if True:",
    ),
    "what waits for the host is not told": (
        "            self.touched |= self.thirsty\n        out.append(Free",
        "            pass\n        out.append(Free",
    ),
    "what the disk cannot hold is sent again": (
        "            if place == DISK:\n                self.stays.add(i)\n",
        "",
    ),
    "what the disk cannot hold is sent there past the host": (
        "return None if bound else DISK",
        "return DISK",
    ),
    "what the disk cannot hold leaves the host": (
        "                if j in self.stays:\n                    continue\n",
        "",
    ),
    "what cannot leave is not known in the end": (
        "home | {i for i in self.stays & there if self.shared or self._host_deficit(i) > 0}",
        "home",
    ),
    "results take room on the host": (
        "return 0 if place == HOST and i in self.plan.deliver else self.nbytes[i]",
        "return self.nbytes[i]",
    ),
    "what comes from the disk leaves it": (
        "down = dst < 0 and dst < src",
        "down = dst < 0 or src == DISK",
    ),
    "a reader that waits for the disk is not recalled": (
        "                if r in self.absent:",
        "                if False:",
    ),
    "a result in a shared memory is a replica": (
        "        if len(where) > 1 and not (self.shared and DISK not in where):",
        "        if len(where) > 1:",
    ),
    "what left a shared memory is read from the result": (
        "            if self.shared:\n                src = DISK\n            elif",
        "            if",
    ),
    "a shared memory is left for the host": (
        "        if memory == HOST or self.shared:\n            refuge",
        "        if memory == HOST:\n            refuge",
    ),
    "values of the graph take room in a shared memory": (
        "                self.nbytes[i] = 0\n",
        "                pass\n",
    ),
    "in a shared memory only the home device reads": (
        "        if memory == HOST or self.shared:  # for any device\n",
        "        if memory == HOST:\n",
    ),
    "the host serves one device": (
        "        if memory == HOST or self.shared:  # for any device\n",
        "        if self.shared:\n",
    ),
    "spilling is not counted": ("            self.spilled[refuge] += self.nbytes[i]\n", ""),
    "traffic is not counted": (
        "        self.traffic[src, dst] = self.traffic.get((src, dst), 0) + self.nbytes[i]\n",
        "",
    ),
    # what steps take while they run
    "what steps take while they run has no room": (
        "        if self.short and not self.bare:\n",
        "        if False:\n",
    ),
    "what steps take while they run has room after the first": (
        "(machine.arrays > 0 or any(self.extra.values())) and plan.may_be_short\n",
        "False\n",
    ),
    "what steps take while they run is only that of the next": (
        "return max(extra, most) + sum",
        "return extra + sum",
    ),
    "what steps take while they run is forgotten": (
        "        if extra:\n            self.work.setdefault(d, {})[i] = extra\n",
        "",
    ),
    "what steps take while they run is counted for good": (
        "        if self.work:\n            self._forget_working_memory(i, place)\n",
        "",
    ),
    "what steps take while they run has no bound": (
        "return known if known <= room else max(room, 0)",
        "return known",
    ),
    "what steps take while they run is not learnt": (
        "                self.short = self.plan.is_short(self.plan.at_once * event.extra)\n",
        "                pass\n",
    ),
    "what steps take while they run has the room of what stays": (
        "room = self.limit[memory] - self.rooted[memory] - nbytes[i]",
        "room = self.limit[memory] - nbytes[i]",
    ),
    # at the end of all means
    "what takes no room leaves for it": (
        "return not own and self._counted_bytes(i, memory) > 0",
        "return not own and self._counted_bytes(i, memory) >= 0",
    ),
    "nothing is doubted when something was let go of": (
        "if self.left and self.is_quiet:",
        "if self.left and not out and self.is_quiet:",
    ),
    "something is doubted while work is under way": (
        "if self.left and self.is_quiet:",
        "if self.left:",
    ),
    "nothing is ever doubted": ("if self.left and self.is_quiet:", "if False:"),
    "guesses are always believed": ("            if self.guess[i]:\n", "            if False:\n"),
    "guesses are never believed": (
        "            if self.guess[i]:\n",
        "            if True:\n",
    ),
    "out of memory while work is under way": (
        "return not self.coming and not any(self.busy.values())",
        "return not self.coming",
    ),
    "finished before the copies are": (
        "return self.left == 0 and not self.coming",
        "return self.left == 0",
    ),
}


FUSION_TESTS = (
    "pipeline/test_template.py", "fusion/test_fuser.py", "fusion/test_horizontal.py",
    "test_scheduler.py", "pipeline/test_cache.py", "plan/test_placement.py",
    "pipeline/test_template_arrays.py", "pipeline/test_filled_template.py", "test_random.py",
)  # fmt: skip
#: name: (what is replaced, by what); as above, in any file of the package.
FUSION = {
    "a template keeps the constants of its first round": (
        "if i in self.constants:",
        "if False:",
    ),
    "variables around functions are not looked at again": (
        "return all(_are_same(made_of(it), before) for it, before in around)",
        "return True",
    ),
    "globals of a template are not looked at again": (
        "return all_unchanged(self.around) and not self.entry.graph.has_changed()",
        "return all_unchanged(self.around)",
    ),
    "one array twice is like two": (
        "out.append((first.setdefault(id(value), n), place, facts))",
        "out.append((n, place, facts))",
    ),
    "where data is does not count": (
        "out.append((first.setdefault(id(value), n), place, facts))",
        "out.append((first.setdefault(id(value), n), facts))",
    ),
    "how data lies in memory does not count": (
        "return type(value), value.dtype, type_char(value.dtype), value.shape, value.strides",
        "return type(value), value.dtype, type_char(value.dtype), value.shape",
    ),
    "True is like 1": (
        "if kind is int or kind is bool or v is None:\n            return kind, v",
        "if kind is int or kind is bool or v is None:\n            return int, v",
    ),
    "minus zero is like zero": (
        "return kind, repr(v)\n        if kind is Task",
        "return kind, v\n        if kind is Task",
    ),
    "arrays in tasks stay those of the first round": (
        "            if i in self.slots:\n",
        "            if False:\n",
    ),
    "a program that does not fit has the arrays of the first round": (
        "return _fill_task(self.task, self.arrays, {})",
        "return self.task",
    ),
    "values that were looked at do not count": (
        "entry = found.fill(like, wanted) if found.fits(like) else None",
        "entry = found.fill(like, wanted)",
    ),
    "True is like 1 in columns": (
        "return kind, bytes(column)",
        "return int, integers(list(map(int, column)))",
    ),
    "where lists of keys end does not count": (
        "else integers(map(len, column))",
        "else sum(map(len, column))",
    ),
    "which name a key has does not count": (
        'return "keys", who, lengths, tuple(index)',
        'return "keys", lengths, tuple(index)',
    ),
    "which tasks call a function does not count": (
        "return integers(order), tuple(map(tell, groups))",
        "return tuple(map(tell, groups))",
    ),
    "booleans and large integers are like short integers": (
        "return out if out[5::5] == _INTEGER * len(column) else None",
        "return out[5::5]",
    ),
    "zeros have no sign in columns": (
        "return kind, tuple(map(repr, column))",
        "return kind, tuple(column)",
    ),
    "blocks are in the order of their layer": (
        "    if tuple(items) == keys:",
        "    if True:",
    ),
    "a plan is taken over by other data of the same names": (
        "any(map(is_not, like.data, self._data))",
        "False",
    ),
    "a plan is taken over with the functions of an earlier round": (
        "known.for_graph(template.graph_of(like, wanted))",
        "known",
    ),
    "a plan is taken over whatever values decided": (
        "if not (template.is_valid() and template.fits(like)):",
        "if not template.is_valid():",
    ),
    "values that were looked at may change in a later round": (
        "values = {id(data[n]): (data[n], before) for n, before in self.values.items()}",
        "values = {}",
    ),
    "variables of a later round are not looked at": (
        "around = like.around + self.around",
        "around = self.around",
    ),
    "functions that a later round has of an earlier one are not looked at": (
        "around = like.around + self.around",
        "around = like.around",
    ),
    "a template keeps arrays that functions have around them": (
        "[v for v in (*like.around, *graph.around) if taken.empty(v) is v]",
        "[*like.around, *graph.around]",
    ),
    "a kernel of a function with an object gets a template": (
        "return swap_parts(task, lambda it: None if id(it) in objects else it, {}) is task",
        "return True",
    ),
    "a task of our own that reads a file gets a template": (
        "for v in constants.values()) and not _is_as_written(task):",
        "for v in constants.values()) and False:",
    ),
    "arrays in files of any dtype are alike": (
        "return type(value), dtype, type_char(dtype), value.shape, strides",
        "return type(value), value.shape, strides",
    ),
    "a template keeps what its functions read around them": (
        "g for g in graph.globals if type(g[0]) is not ClosureCells or taken.empty(g[2]) is g[2]",
        "g for g in graph.globals",
    ),
    "lists may be changed by anybody": (
        "if kind is list and self.decide_lists():",
        "if kind is list:",
    ),
    "lists and arrays that tasks read are not watched": (
        "            self.around.append((it, made_of(it)))\n",
        "",
    ),
    "any function may get lists": (
        "WATCHED if is_trusted(function) and all(map(is_harmless, args)) else ANYBODYS",
        "WATCHED",
    ),
    "arguments change no lists": (
        "WATCHED if is_trusted(function) and all(map(is_harmless, args)) else ANYBODYS",
        "WATCHED if is_trusted(function) else ANYBODYS",
    ),
    "an array is told by its values and data, too": (
        "if told and not told.isdisjoint(map(id, data)):",
        "if False:",
    ),
    "what is persisted has the names of the first round": (
        "called.update(zip(graph.wanted, wanted, strict=True))",
        "pass",
    ),
    "steps have the names of the first round": (
        "key, constants = _rename_key(s.key, names), s.constants",
        "key, constants = s.key, s.constants",
    ),
    "what is done together has the names of the first round": (
        "return TupleItemKey(tuple([_rename_key(k, names) for k in key.keys]))",
        "return key",
    ),
    "a template is learned from its first round alone": (
        "if self.like is not None and not self.like.plan.tried:",
        "if False:",
    ),
    "a copy is foreseen as a view": (
        "same = v.copied or ir_expr.is_contiguous(",
        "same = ir_expr.is_contiguous(",
    ),
    "a tree of any size disappears into its end": (
        "if source and read + more <= MOST_READ and",
        "if source and",
    ),
    "siblings come in any order": (
        "sorted(group, key=lambda k: number[id(fused[k].program)])",
        "group",
    ),
    "a value of another type is read all the same": (
        'if getattr(value, "dtype", None) != foreseen.dtype:',
        "if False:",
    ),
    "a value of another layout is read all the same": (
        "if _is_laid_out(value, foreseen):",
        "if True:",
    ),
    "a value of another shape is read all the same": (
        'if getattr(value, "shape", None) != foreseen.shape:',
        "if False:",
    ),
    "a value in other containers is read all the same": (
        "if type(value) is not type(foreseen):",
        "if False:",
    ),
    "a number beside arrays is not looked at": (
        "return bool(literal(value, []) == literal(foreseen, []))",
        "return True",
    ),
    "positions are forgotten": (
        "enumerate(self.positions)}\n\n        def evaluate",
        "enumerate(())}\n\n        def evaluate",
    ),
    "what was inlined is not read by its reader": (
        "            new.update(zip(before.names, before.needs, strict=True))\n",
        "",
    ),
    "constants of what was inlined are lost": (
        "            constants.update(before.constants)\n",
        "",
    ),
    "what two read disappears into both": (
        "if not is_cheaper_computed(source, readers if times is None else times):",
        "if False:",
    ),
    "the seed is forgotten": (
        "words = id(self._alive.setdefault(id(array), array)), shape, position % 2",
        "words = array.method, shape, position % 2",
    ),
    "odd positions are even": (
        "expr = array.expression(shape, position % 2)",
        "expr = array.expression(shape, 0)",
    ),
    "wanted values are swallowed": (
        "return self.graph.nodes[key].pin is None and key not in self.outputs",
        "return self.graph.nodes[key].pin is None",
    ),
    "impure functions are followed": (
        "            self.reason = self._reads.why_impure(function)\n",
        "            pass\n",
    ),
    "least is not heeded": (
        "self._count_bytes(task) >= self.least\n",
        "self._count_bytes(task) >= 0\n",
    ),
    "borrowed arrays keep their numbers": ("    if not borrowed:\n", "    if True:\n"),
    "original of a fused pair is the reader alone": (
        "            original = self.inliner.add_producers(task)\n",
        "",
    ),
    "siblings on different pins merge": (
        "groups.setdefault((read, node.pin), [])",
        "groups.setdefault((read, None), [])",
    ),
    "large siblings merge": ("or not _is_small(task):", "or False:"),
    "wanted siblings merge": ("key in kept or task.positions", "task.positions"),
    "all reductions of a pass are its first": (
        "reductions.setdefault(r, len(reductions))",
        "reductions.setdefault(r, 0)",
    ),
    "all siblings are one pass": (
        "alike = other.shape == kernel.shape and other.axes == kernel.axes",
        "alike = other.shape == kernel.shape",
    ),
    "a tape forgets what waits for a copy": (
        "waits = [j for j in plan.steps[step].inputs if j in fetched[place]]",
        "waits: list[int] = []",
    ),
    "a tape waits for a copy again and again": (
        "                fetched[place].difference_update(waits)\n",
        "",
    ),
    "a tape lets go of what others read": ("elif step not in copied:", "else:"),
    "a tape lets go of nothing": ("elif step not in copied:", "elif False:"),
    "a tape does not count replicas": ("extra[instruction.dst] += step.nbytes", "pass"),
    "a tape does not count what others read": (
        "extra[step.place] += step.nbytes",
        "pass",
    ),
    "a tape counts what others read for each of them": (
        "if instruction.step not in copied and not step.fixed:",
        "if not step.fixed:",
    ),
    "a tape heeds no limit": (
        "if any(n > plan.machine.memory[d] for d, n in peak.items()):",
        "if False:",
    ),
    "a tape takes what runs aside": ("if step.aside:", "if False:"),
    "a tape takes results to the host": (
        "if plan.deliver or plan.machine.shared:",
        "if False:",
    ),
    "all orders go to the first device at once": (
        "        count = 1\n        while",
        "        count = 99\n        while",
    ),
    "copies come from the first device first": (
        "turn[step] = (other - place) % devices if other >= 0 else 0",
        "turn[step] = other",
    ),
    "a launch does not wait for its copies' turn": (
        "turn[step] = max([turn.get(j, 0) for j in plan.steps[step].inputs], default=0)",
        "turn[step] = 0",
    ),
    "a changed global keeps its plan": (
        "if gone or found.entry.graph.has_changed():",
        "if gone:",
    ),
    "a product that others read is added up": (
        "return self.readers[key] == 1 and key not in self.kept",
        "return key not in self.kept",
    ),
    "a product that is wanted is added up": (
        "return self.readers[key] == 1 and key not in self.kept",
        "return self.readers[key] == 1",
    ),
    "a product that is read twice is added up": (
        "and times[name] == 1:",
        "and times[name]:",
    ),
    "products of all devices are added up": (
        "where = {n: (self.places[d], self._shape(d)) for n, d in terms.items()}",
        "where = {n: (0, self._shape(d)) for n, d in terms.items()}",
    ),
    "products of all shapes are added up": (
        "where = {n: (self.places[d], self._shape(d)) for n, d in terms.items()}",
        "where = {n: (self.places[d], 0) for n, d in terms.items()}",
    ),
    "any number of products is added up": (
        "count = -(-len(members) // most)",
        "count = 1",
    ),
    "products are added up in any memory": (
        "most = max(1, min(MOST, self.room // factors))",
        "most = MOST",
    ),
    "parts of products are added up": (
        "if a[0].data[1] == b[0].data[1] and a[0].dtype",
        "if a[0].dtype",
    ),
    "what uses a product elsewhere is not looked for": (
        'elif node.op == "add" and all(id(a) in parts and uses[id(a)] == 1 for a in node.args):',
        'elif node.op == "add" and all(id(a) in parts for a in node.args):',
    ),
    "what does more than add is the sum alone": (
        'if more or root.op != "input" or kernels[0].strides is not None:',
        "if more:",
    ),
    "a sum that is seen turned is the sum alone": (
        "return canonical_view(root.data[1], shape) == canonical_view("
        "View.contiguous(shape), shape)",
        "return True",
    ),
    "a sum on another device is made where it is read": (
        "if change.whole and self.places[groups[0][0]] == self.places[key]:",
        "if change.whole:",
    ),
    "a part of a sum is the sum": (
        "if math.prod(shape) == math.prod(nodes[groups[0][0]].block.shape):",
        "if True:",
    ),
    "a sum comes before what it reads": (
        "last.setdefault(max(members, key=order.__getitem__), [])",
        "last.setdefault(min(members, key=order.__getitem__), [])",
    ),
    "what was added up before is forgotten": (
        "[node.task for node in some], before, fallback",
        "[node.task for node in some], None, fallback",
    ),
    "nobody reads what was added up before": (
        "read[before] = before",
        "pass",
    ),
    "terms that are gone are not read as zeros": (
        "np.zeros_like(values[s])",
        "values[s]",
    ),
}


#: Tests that must notice mutants of a file; those of all other files are FUSION_TESTS.
TESTS = {
    "gpuscheduler/runtime/state.py": ("runtime/test_state.py",),
    "gpuscheduler/runtime/tape.py": ("runtime/test_tape.py",),
    "gpuscheduler/plan/matmul.py": ("plan/test_matmul.py",),
    "gpuscheduler/pipeline/columns.py": ("pipeline/test_columns.py",),
    "gpuscheduler/pipeline/template.py": ("pipeline/test_template_objects.py", *FUSION_TESTS),
    "gpuscheduler/fusion/task.py": (*FUSION_TESTS, "fusion/test_block_structures.py"),
}


@cache
def package_sources() -> dict[str, str]:
    """The text of each file of the package, by its path from the root."""
    files = sorted((ROOT / "gpuscheduler").rglob("*.py"))
    return {str(f.relative_to(ROOT)): f.read_text(encoding="utf-8") for f in files}


def break_source(name: str) -> tuple[str, str]:
    """The file of a mutant, and that file's text with the mutant in it.

    Raises SystemExit unless exactly one file has the mutant's text, exactly once.
    """
    old, new = MUTANTS[name] if name in MUTANTS else FUSION[name]
    state = "gpuscheduler/runtime/state.py"
    files = [state] if name in MUTANTS else list(package_sources())
    found = {f: package_sources()[f].count(old) for f in files if old in package_sources()[f]}
    if list(found.values()) != [1]:
        raise SystemExit(f"mutants.py: {name!r}: its text occurs {found or 'nowhere'}, not once")
    (file,) = found
    return file, package_sources()[file].replace(old, new)


def outcome(file: str, source: str) -> tuple[bool, str]:
    """Whether the tests fail on a copy of the package with this source; and which did."""
    tests = TESTS.get(file, FUSION_TESTS)
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        leave = shutil.ignore_patterns("__pycache__")
        for name in ("gpuscheduler", "graphs", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=leave)
        shutil.copy(ROOT / "pyproject.toml", copy)
        (copy / file).write_text(source, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += ["--no-header", "--timeout=60", *[f"tests/{t}" for t in tests]]
        env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    failed = [w for w in done.stdout.split() if w.startswith("tests/") and "::" in w]
    if done.returncode and not failed and "Timeout" in done.stdout + done.stderr:
        failed = ["::(timeout)"]
    if done.returncode and not failed:
        raise SystemExit(f"mutants.py: the tests did not run:\n{done.stdout}{done.stderr}")
    return bool(done.returncode), failed[0].split("::")[1] if failed else ""


def results(names: list[str]) -> Iterator[tuple[str, bool, str]]:
    """Each mutant, whether tests notice it, and the first test that does."""
    broken = [break_source(name) for name in names]
    for file in dict.fromkeys(file for file, _ in broken):
        if outcome(file, package_sources()[file])[0]:
            raise SystemExit("mutants.py: the tests fail without any mutant")
    with ThreadPoolExecutor(2) as pool:
        caught = pool.map(outcome, *zip(*broken, strict=True))
        for name, (noticed, by) in zip(names, caught, strict=True):
            yield name, noticed, by


def main(words: list[str]) -> int:
    names = [n for n in (*MUTANTS, *FUSION) if all(w in n for w in words)]
    survived = 0
    for name, caught, by in results(names):
        print(f"{name:58s} {'caught' if caught else 'SURVIVED'}  {by}", flush=True)
        survived += not caught
    print(f"{len(names)} mutants, {survived} survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
