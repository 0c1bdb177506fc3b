"""What do three nodes say to each other? Recorded scripts, one per promise; see conftest.py for recording anew."""

from emberkv.messages import ReplicaItem, Replicate
from emberkv.types import PutStatus, Version, checksum, shard_of
from harness.script import Script
from harness.world import World, key_of, keys_of_shard

SHARD = 3
K1, K2 = keys_of_shard(SHARD, 2)
NAMES = {K1: "k1", K2: "k2"}


def calm() -> tuple[World, Script, str, str, str]:
    """World, script, and the names of primary, backup and outsider of the shard."""
    world = World("abc", seed=1)
    world.delay_ms = (1.0, 1.0)
    world.settle()
    world.run_ms(2000)
    owner = world.nodes["a"].core.state.view.owners[SHARD]
    primary, backup = owner.primary, next(name for name in owner.replicas if name != owner.primary)
    (outsider,) = set("abc") - set(owner.replicas)
    script = Script(world, NAMES)
    script.say(f"shard {SHARD}: primary {primary}, backup {backup}; {outsider} holds no copy")
    return world, script, primary, backup, outsider


def test_put(golden):
    world, script, primary, backup, outsider = calm()
    script.say("a session put at the primary")
    world.put_now(primary, [K1], [b"one"])
    world.run_ms(10)
    script.say("a session put with two copies at the outsider")
    world.put_now(outsider, [K2], [b"two"], min_copies=2)
    world.run_ms(10)
    script.say("an eventual put at the backup, which has the bytes already when the stream comes back")
    world.put_now(backup, [K1], [b"three"], session=False)
    world.run_ms(10)
    script.say("a replay of an old put may only fill")
    world.put_now(primary, [K1], [b"one"], fresh=False)
    script.say("a delete at the outsider")
    world.put_now(outsider, [K1], delete=True)
    world.run_ms(10)
    golden("put", script.text())


def test_get(golden):
    world, script, primary, _, outsider = calm()
    world.put_now(primary, [K1], [b"one"])
    world.run_ms(10)
    script.say("the outsider asks a replica, and keeps a near copy")
    world.get_now(outsider, [K1])
    world.get_now(outsider, [K1])
    script.say("absent everywhere: each replica is asked once")
    world.get_now(outsider, [K2])
    script.say("a flipped byte at the primary: the copy is dropped, the backup's is taken")
    node = world.nodes[primary]
    node.tier.bytes[node.core.state.directory.get(K1).slot.offset][0] ^= 1
    world.get_now(primary, [K1])
    script.say("the primary is frozen: the backup is asked after half of the time")
    world.nodes[outsider].core.state.directory.remove(world.nodes[outsider].core.state.directory.get(K1))
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
    world.run_ms(1500)
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
    world.run_ms(2000)
    world.get_now(primary, [K1, K2])
    (outcome,) = world.put_now(primary, [K1], [b"after"])
    assert outcome.status is PutStatus.STORED
    assert shard_of(key_of(1)) != SHARD
    golden("split_brain", script.text())
