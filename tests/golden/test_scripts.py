"""What do three nodes say to each other? Recorded scripts, one per promise; see conftest.py for recording anew."""

from emberkv.messages import ReplicaItem, Replicate
from emberkv.types import SHARDS, PutStatus, Version, checksum, shard_of
from harness.script import Script
from harness.world import World, key_of, keys_of_shard

SHARD = 3
K1, K2, K3 = keys_of_shard(SHARD, 3)
NAMES = {K1: "k1", K2: "k2", K3: "k3"}


def calm(names: str = "abc", **settings: object) -> tuple[World, Script, str, str, str]:
    """World, script, and the names of primary, backup and one outsider of the shard."""
    world = World(names, seed=1, **settings)
    world.delay_ms = (1.0, 1.0)
    world.settle()
    world.run_ms(2500)
    owner = world.nodes["a"].core.state.view.owners[SHARD]
    primary, backup = owner.primary, next(name for name in owner.replicas if name != owner.primary)
    outsider = min(set(names) - set(owner.replicas))
    script = Script(world, NAMES)
    script.say(f"shard {SHARD}: primary {primary}, backup {backup}; {outsider} holds no copy")
    return world, script, primary, backup, outsider


def cut_off(world: World, name: str) -> None:
    """The node reaches no other one, but the coordinator."""
    for other in world.names:
        if other != name:
            world.cut(name, other)


def test_put(golden):
    world, script, primary, backup, outsider = calm()
    script.say("a session put at the primary")
    world.put_now(primary, [K1], [b"one"])
    world.run_ms(10)
    script.say("a session put with two copies at the outsider")
    world.put_now(outsider, [K2], [b"two"], min_copies=2)
    world.run_ms(10)
    script.say("an eventual put at the backup, which has seen what it holds, and the bytes when the stream comes back")
    world.put_now(backup, [K1], [b"three"], session=False)
    world.run_ms(10)
    script.say("a replay of an old put may only fill")
    world.put_now(primary, [K1], [b"one"], fresh=False)
    script.say("a delete at the outsider")
    world.put_now(outsider, [K1], delete=True)
    world.run_ms(10)
    script.say(f"{outsider} does not reach the primary: its put goes over {backup}")
    world.cut(outsider, primary)
    world.put_now(outsider, [K2], [b"over one hop"])
    world.run_ms(10)
    script.say("an eventual put that was accepted in a partition does not overwrite what was put after it")
    world.cut(outsider, backup)
    world.put_now(outsider, [K3], [b"accepted first"], session=False)
    world.put_now(primary, [K3], [b"acknowledged"])
    world.heal()
    world.run_ms(100)
    golden("put", script.text())


def test_get(golden):
    world, script, primary, backup, outsider = calm("abcd")
    world.put_now(primary, [K1], [b"one"])
    world.run_ms(10)
    script.say("the outsider asks the primary, and keeps a near copy")
    world.get_now(outsider, [K1])
    script.say("a session read of the near copy: is it the newest?")
    world.get_now(outsider, [K1])
    script.say("an eventual read asks nobody")
    world.get_now(outsider, [K1], session=False)
    script.say("absent everywhere: each replica is asked once")
    world.get_now(outsider, [K2])
    script.say("a flipped byte at the primary: the copy is dropped, the backup's is taken")
    node = world.nodes[primary]
    node.tier.bytes[node.core.state.directory.get(K1).slot.offset][0] ^= 1
    world.get_now(primary, [K1])
    script.say("the backup misses a write that its reader has seen: it asks the primary, and to be compared")
    world.cut(primary, backup)
    (second,) = world.put_now(primary, [K1], [b"two"])
    world.cuts.clear()
    world.get_now(backup, [K1], floors=[second.version])
    world.run_ms(200)
    script.say(f"{outsider} does not reach the primary: the backup vouches for what is at the reader's floor")
    world.cut(outsider, primary)
    world.get_now(outsider, [K1], floors=[second.version])
    script.say(f"{outsider} reaches neither replica: one other node looks for it")
    world.cut(outsider, backup)
    world.get_now(outsider, [K1])
    script.say(f"{outsider} reaches nobody: it does not say that the block is absent")
    cut_off(world, outsider)
    world.get_now(outsider, [K1, K2])
    world.heal()
    world.run_ms(100)
    script.say("the primary is frozen: the backup is asked after half of the time")
    world.pause(primary)
    world.get_now(outsider, [K1], deadline_ms=100)
    golden("get", script.text())


def test_failover(golden):
    world, script, primary, backup, outsider = calm()
    world.put_now(primary, [K1], [b"one"], min_copies=2)
    script.say(f"{primary} is killed; a session put waits at {outsider}")
    world.kill(primary)
    world.put_now(outsider, [K2], [b"two"], deadline_ms=5000)
    world.run_ms(1500)
    script.say("what was acknowledged is read at the new primary")
    world.get_now(backup, [K1, K2])
    script.say(f"{primary} is back with an empty memory")
    world.restart(primary)
    world.run_ms(3000)
    golden("failover", script.text())


def test_split_brain(golden):
    world, script, primary, backup, outsider = calm()
    script.say(f"{primary} no longer reaches the coordinator, but all nodes still reach each other")
    world.isolate_coordinator(primary)
    world.run_until(lambda: not world.nodes[primary].core.lease.open(world.now))
    script.say("its lease has lapsed: it refuses what peers forward and queues what its own clients put")
    world.put_now(outsider, [K1], [b"one"], deadline_ms=30)
    world.put_now(primary, [K2], [b"two"], deadline_ms=30)
    world.run_until(lambda: world.nodes[backup].core.state.view.primary_of(SHARD) == backup, 3000)
    world.run_ms(100)
    script.say(f"{backup} has taken over; what waited reached it")
    script.say("a late message of the old primary has a lower authority: FENCED")
    old = world.nodes[primary].core.state.view.primary_epoch[SHARD]
    item = ReplicaItem(K1, old, Version(old, 99), b"p" * 24, checksum(b"late"), payload=False)
    world.nodes[primary].core.state.send(backup, Replicate([item]), [])
    world.run_ms(50)
    script.say(f"{primary} reaches the coordinator again: it rejoins as a learner and hands over what waited")
    world.rejoin_coordinator(primary)
    world.run_ms(3000)
    world.get_now(primary, [K1, K2])
    (outcome,) = world.put_now(primary, [K1], [b"after"])
    assert outcome.status is PutStatus.STORED
    assert shard_of(key_of(1)) != SHARD
    golden("split_brain", script.text())


def test_isolated(golden):
    world, script, primary, _, outsider = calm()
    script.say(f"{primary} reaches the coordinator and no other node: after a lease it gives its shards up")
    cut_off(world, primary)
    (outcome,) = world.put_now(primary, [K1], [b"known to one"])
    assert outcome.status is PutStatus.STORED
    world.run_until(lambda: world.primary(SHARD) not in (None, primary), 5000)
    world.run_ms(100)
    script.say("the others go on; what its own clients put waits")
    world.put_now(outsider, [K2], [b"two"])
    world.put_now(primary, [K3], [b"three"], deadline_ms=30)
    script.say("healed: what it had stamped is handed in as it was, and what waited is put")
    world.heal()
    world.run_ms(3000)
    world.get_now(outsider, [K1, K2, K3])
    golden("isolated", script.text())


def test_drain(golden):
    world, script, primary, backup, outsider = calm("abcd")
    world.put_now(primary, [K1, K2], [b"one", b"two"], min_copies=2)
    script.say(f"{primary} shall be stopped: it is drained first")
    world.drain(primary)
    world.run_until(lambda: SHARD in world.nodes[primary].core.state.closed, 20_000, 1)
    script.say("a put meets the closed gate: it waits and is forwarded, and nothing fails")
    (outcome,) = world.put_now(primary, [K3], [b"three"])
    assert outcome.status is PutStatus.STORED
    view = world.nodes[backup].core.state.view
    world.run_until(lambda: not any(primary in view.owners[shard].replicas for shard in range(SHARDS)), 20_000)
    script.say("it holds no shard any more and can be killed")
    world.kill(primary)
    world.get_now(outsider, [K1, K2, K3])
    golden("drain", script.text())


def test_repair(golden):
    world, script, primary, backup, outsider = calm()
    script.say("the backup misses one write and is sent that one")
    world.put_now(primary, [K1], [b"one"], min_copies=2)
    world.cut(primary, backup)
    world.put_now(primary, [K2], [b"two"])
    world.heal()
    world.run_ms(200)
    script.say("the backup restarts with an empty memory and asks for heads")
    world.restart(backup)
    world.run_ms(2000)
    script.say("a write that the primary gave up for room is told without bytes: nothing older stays for it")
    world.cut(primary, backup)
    world.put_now(primary, [K1], [b"newer"])
    directory = world.nodes[primary].core.state.directory
    directory.evict(directory.get(K1))
    world.heal()
    world.run_ms(200)
    script.say("a near copy of a delete that is forgotten does not come back")
    world.get_now(outsider, [K2])
    world.put_now(primary, [K2], delete=True)
    world.run_ms(50)
    for node in world.nodes.values():
        node.core.state.directory.forget_tombstones(world.now + 1)
    world.get_now(outsider, [K2])
    golden("repair", script.text())
