// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Snapshots at random moments of a guest that uses disk, network and console.
//!
//! The first test is a chain for each backing: it saves the running guest, restores it paused in each
//! mode, saves it again, compares memory and registers of both, and lets the restored guest run on, up
//! to the next snapshot. For a restore by an order file, the guest is restored once more to record it.
//! `GRANULE_SNAPSHOTS` sets the number of snapshots for each backing and mode, `GRANULE_BACKING` selects
//! one backing. The second test runs guests on memory that is not there yet, as often as
//! `GRANULE_RESTORES` has it for each backing. The third compares the memory of the process with that of a
//! restore from incremental snapshots, which follow one of a stopped guest or a live one. The fourth ends
//! the process while it saves in each way, by SIGKILL and SIGTERM in turn; `GRANULE_KILLS` sets how often.
//! `GRANULE_SEED` repeats the moments of a run, which prints its seed.
//!
//! A guest that is restored finds what its round has written to the disk, although the saved guest has
//! gone on: it writes to the same place 16 rounds later, and is stopped before.

use std::{
    env,
    time::{SystemTime, UNIX_EPOCH},
};

use granule_types::testing::skip;

use super::host::{EmulatedHost, parse_number};

/// Functions of the host's shell. `prepare` builds the guest's initramfs; `start OPTIONS` runs the
/// guest, which saves to `$to` with the options `$snapshot`, and `restore VALUE` the guest of `$to`, which
/// saves to the other directory. `dump MIB` copies the guest's memory of this size from the process.
/// `record_order VALUE` restores a guest for a moment, which records an order file. `rounds
/// N` waits for N more rounds; `finish` stops the guest and prints what it has found, and
/// `save_and_finish` saves it before; `end_while_saving SIGNAL SECONDS REQUEST` sends it a signal.
const SHELL_FUNCTIONS: &str = r#"
nice="nice -n 19" # The host has one CPU: a request need not wait for the guest.
prepare() {
    install_programs /bin/busybox
    modules virtio_mmio virtio_blk virtio_net virtio_rng
    pack_guest_with_disk <<'INIT'
busybox ip addr add 192.168.78.2/24 dev eth0 && busybox ip link set eth0 up
busybox dd if=/dev/urandom of=/data bs=1000000 count=1 2>/dev/null
sum=$(busybox md5sum </data)
round=0
while :; do
    round=$((round + 1))
    busybox dd if=/dev/urandom of=/part bs=4096 count=16 2>/dev/null
    busybox dd if=/part of=/dev/vda bs=4096 seek=$((round % 16 * 16)) conv=fsync 2>/dev/null
    busybox dd if=/dev/vda of=/read bs=4096 count=16 skip=$((round % 16 * 16)) iflag=direct 2>/dev/null
    busybox cmp /part /read || echo "disk differs"
    [ "$(busybox md5sum </data)" = "$sum" ] || echo "memory differs"
    pings=$(busybox ping -q -c 3 -i 0.1 -W 5 -s 1000 192.168.78.1)
    echo "$pings" | busybox grep -q ' [123] packets received' || echo "network differs:" $pings
    echo "round $round has ended, $(busybox nproc) CPUs"
done
INIT
    truncate -s 1M /tmp/disk
    chmod 666 /tmp/disk && mkdir -m 777 /tmp/run
    ip tuntap add dev tap8 mode tap vnet_hdr user nobody
    ip addr add 192.168.78.1/24 dev tap8 && ip link set tap8 up
    # The host pings a guest that is not there yet. It would drop its answers to the first pings of the guest if it
    # has just given up to resolve this address, which depends on the tap's name.
    ip neigh replace 192.168.78.2 lladdr 02:ae:dd:ac:07:ef dev tap8
    chmod 666 /dev/net/tun # As udev does: the user of a restore opens it.
    (while :; do ping -q -i 0.05 192.168.78.2 >/dev/null 2>&1; sleep 0.1; done) &
}
start() {
    to=/tmp/run/a other=/tmp/run/b; rm -rf $to $other
    run_with_socket --snapshot $to$snapshot --kernel /mnt/vmlinuz --initrd /tmp/small.cpio --balloon on --vcpus 2 \
        --cmdline "console=ttyS0 quiet" --disk /tmp/disk --net tap=tap8 "$@"
}
restore() {
    from=$to to=$other other=$from
    run_with_socket --restore "$from$1" --snapshot $to$snapshot
    until [ -S /tmp/run/vm.sock ]; do kill -0 $pid || return; sleep 0.1; done
}
dump() {
    while read -r range rest; do
        start=$((0x${range%-*}))
        [ $((0x${range#*-} - start)) = $(($1 << 20)) ] && break
    done </proc/$pid/maps
    dd if=/proc/$pid/mem of=/tmp/dump bs=1M count=$1 iflag=skip_bytes,fullblock skip=$start 2>/dev/null
}
record_order() {
    rm -f /tmp/run/order
    restore $1; sleep 0.2; finish
    from=$to to=$other other=$from
    head -n 1 /tmp/run/order; echo "parts=$(wc -l </tmp/run/order)="
}
count() { grep -ac 'has ended' /tmp/out; }
rounds() {
    last=$(($(count) + $1))
    until [ "$(count)" -ge $last ]; do kill -0 $pid 2>/dev/null || break; sleep 0.2; done
}
is_running() { kill -0 $pid || { cat /tmp/out; return 1; }; }
save_and_finish() { request_snapshot 'POST /v1/stop'; ended; }
finish() { request 'POST /v1/stop' >/dev/null; ended; }
ended() {
    wait $pid; echo "status=$?"
    echo "rounds=$(count)="
    grep -a 'differs\|granule:\|Oops\|Call trace' /tmp/out | tail -n 4
}
registers() { # All registers of vCPUs but those of timers, which go on.
    grep -o '"0x60[0-9a-f]*":"[0-9a-f]*"' $1/state.jsonl | grep -v '"0x603000000013df[01]'
}
compare() {
    cmp $from/memory-* $to/memory-* && echo "memory is identical"
    registers $from >/tmp/before; registers $to >/tmp/after
    diff /tmp/before /tmp/after && [ -s /tmp/before ] && echo "registers are identical"
    true
}
state() { cksum <$to/state.jsonl | cut -d ' ' -f 1; }
end_while_saving() {
    before=$(state)
    request "$3" >/tmp/answer 2>&1 &
    client=$!
    sleep $2
    kill -$1 $pid; wait $pid 2>/dev/null; echo "status=$?"
    wait $client 2>/dev/null
    echo "rounds=$(count)= answered=$(grep -c data_bytes /tmp/answer)="
    echo "before=$before= after=$(state)="
    grep -a differs /tmp/out
    true
}
"#;

/// Mode of a restore that copies the parts of a recorded order first.
const ORDERED: &str = ",memory=userfaultfd,order=/tmp/run/order";

/// Enables transparent huge pages of 64K, and no larger ones, on Linux 6.8 and newer.
const ENABLE_SMALL_THP: &str =
    "cd /sys/kernel/mm/transparent_hugepage; sizes=$(ls -d hugepages-64kB 2>/dev/null | wc -l)
[ $sizes = 0 ] || { echo never >hugepages-2048kB/enabled; echo always >hugepages-64kB/enabled; }
cd /; echo sizes=$sizes=";

/// Random delays, whose sequence depends only on the seed.
struct Delays(u64);

impl Delays {
    /// Returns the delays of the seed in `GRANULE_SEED`, or of another one, and prints it.
    fn new() -> Self {
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let seed = env::var("GRANULE_SEED").map_or_else(|_| now(), |seed| seed.parse().unwrap());
        println!("GRANULE_SEED={seed}");
        Self(seed.max(1))
    }

    /// Returns a delay below a number of milliseconds, in seconds.
    fn below(&mut self, limit: u64) -> String {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let delay = self.0 % limit;
        format!("{}.{:03}", delay / 1000, delay % 1000)
    }
}

fn number_in(variable: &str, default: u64) -> u64 {
    env::var(variable).map_or(default, |text| text.parse().unwrap())
}

/// Returns whether a test runs on a backing: `GRANULE_BACKING` selects one.
fn is_selected(backing: &str) -> bool {
    env::var("GRANULE_BACKING").map_or(true, |only| only == backing)
}

/// Checks that a guest was stopped, and that its checks have found nothing.
fn assert_sound(output: &str, context: &str) {
    assert!(output.contains("status=0"), "{context}: {output}");
    for fault in ["differs", "Oops", "Call trace"] {
        assert!(!output.contains(fault), "{context}: {output}");
    }
    assert!((0..14).contains(&parse_number(output, "rounds")), "{context}: {output}");
}

/// Saves the running guest, stops it, restores it paused, compares the memory, and resumes it.
fn save_and_restore(host: &mut EmulatedHost, (mode, delay): (&str, &str), context: &str) {
    let saved = host.run(&format!("sleep {delay}; save_and_finish"));
    if mode == ORDERED {
        let recorded = host.run(&format!("record_order {mode}"));
        assert_sound(&recorded, context);
        assert!(recorded.contains("granule.order/"), "{context}: {recorded}");
        assert!(parse_number(&recorded, "parts") > 1, "{context}: {recorded}");
    }
    let paused = host.run(&format!("restore {mode},paused=on; request 'GET /v1/state'"));
    let again = host.run("request_snapshot; compare");
    let resumed = host.run("request 'POST /v1/resume'");

    assert!(saved.contains("data_bytes"), "{context}: {saved}");
    assert_sound(&saved, context);
    assert!(paused.contains("\"state\":\"paused\""), "{context}: {paused}");
    assert!(again.contains("data_bytes"), "{context}: {again}");
    for part in ["memory is identical", "registers are identical"] {
        assert!(again.contains(part), "{context}: {again}");
    }
    assert!(resumed.contains("\"state\":\"running\""), "{context}: {resumed}");
}

#[test]
#[ignore = "boots an emulated host: minutes"]
fn restored_memory_is_identical_at_random_moments_on_each_backing() {
    let snapshots = number_in("GRANULE_SNAPSHOTS", 4);
    // Two threads of userfaultfd have a buffer of the size of a huge page each.
    let mut host = EmulatedHost::boot_with_memory("6G");
    host.run("echo 1 >/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages");
    host.run("echo 60 >/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages");
    host.prepare_guest(SHELL_FUNCTIONS);
    let mut identical = 0;

    for (backing, memory, modes) in [
        ("4k", "96M", &[",memory=copy", ",memory=map", ",memory=userfaultfd", ORDERED][..]),
        ("thp", "96M", &[",memory=copy", ",memory=userfaultfd", ORDERED]),
        ("2m", "96M", &[",memory=copy", ",memory=userfaultfd", ORDERED]),
        ("1g", "1G", &[",memory=copy", ",memory=userfaultfd", ORDERED]),
        ("4k,shared=on", "96M", &[",memory=copy", ",memory=userfaultfd", ORDERED]),
        ("shared_hugetlb", "96M", &[",memory=copy", ",memory=userfaultfd", ORDERED]),
        ("mthp", "96M", &[",memory=copy", ",memory=userfaultfd", ORDERED]),
    ] {
        if !is_selected(backing) {
            continue;
        }
        if backing == "mthp" && parse_number(&host.run(ENABLE_SMALL_THP), "sizes") == 0 {
            skip(format_args!("mthp: the host's kernel has no transparent huge pages of 64K"));
            continue;
        }
        let mut delays = Delays::new();
        host.run(&format!("start --memory {memory},backing={backing}; rounds 1; is_running"));
        for mode in modes {
            for number in 0..snapshots {
                let delay = delays.below(300);
                let context = format!("{backing}{mode} {number} after {delay} s");
                save_and_restore(&mut host, (mode, &delay), &context);
                identical += 1;
            }
            // The round of the last snapshot, and a whole one.
            let output = host.run("rounds 2; is_running; cat /tmp/out");
            assert!(output.contains("has ended"), "{backing}{mode}: {output}");
            assert!(!output.contains("differs"), "{backing}{mode}: {output}");
        }
        assert_sound(&host.run("finish"), backing);
    }
    assert!(identical > 0, "GRANULE_BACKING is no backing of this test");
    println!("{identical} snapshots, with identical memory and registers after the restore");
}

#[test]
#[ignore = "boots an emulated host: minutes"]
fn a_restored_guest_runs_while_its_memory_is_filled() {
    let restores = number_in("GRANULE_RESTORES", 4);
    // vCPUs take faults beside the threads that fill memory: two of them with four CPUs.
    let mut host = EmulatedHost::boot_with_cpus(4);
    host.run("echo 60 >/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages");
    host.prepare_guest(SHELL_FUNCTIONS);
    host.run("nice=");

    for backing in ["thp", "4k", "4k,shared=on", "shared_hugetlb"] {
        if !is_selected(backing) {
            continue;
        }
        let mut delays = Delays::new();
        host.run(&format!("start --memory 96M,backing={backing}; rounds 1; is_running"));
        for number in 0..restores {
            let delay = delays.below(300);
            let saved = host.run(&format!("sleep {delay}; save_and_finish"));
            // Before that, the guest has run on memory that was not there, and the rest was filled.
            let restored = host.run("restore ,memory=userfaultfd; rounds 2; request_snapshot");

            let context = format!("{backing} {number} after {delay} s");
            assert!(saved.contains("data_bytes"), "{context}: {saved}");
            assert_sound(&saved, &context);
            assert!(restored.contains("data_bytes"), "{context}: {restored}");
        }
        assert_sound(&host.run("finish"), backing);
        println!("{backing}: {restores} guests ran while their memory was filled");
    }
}

#[test]
#[ignore = "boots an emulated host: minutes"]
fn incremental_snapshots_at_random_moments_have_the_memory_of_the_process() {
    let snapshots = number_in("GRANULE_SNAPSHOTS", 4);
    let mut host = EmulatedHost::boot();
    host.run("echo 60 >/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages");
    host.prepare_guest(SHELL_FUNCTIONS);
    let mut identical = 0;

    for (backing, modes) in [
        ("4k", &["copy", "map", "userfaultfd"][..]),
        ("thp", &["copy", "userfaultfd"]),
        ("2m", &["copy", "userfaultfd"]),
    ] {
        if !is_selected(backing) {
            continue;
        }
        let mut delays = Delays::new();
        host.run(&format!(
            "snapshot=,incremental=on; start --memory 96M,backing={backing}; rounds 1; is_running"
        ));
        // The first snapshot has all memory, of a guest that is stopped or that runs on.
        let ways =
            ["", "/live"].into_iter().flat_map(|kind| modes.iter().map(move |mode| (kind, mode)));
        for (number, (kind, mode)) in (0..snapshots).zip(ways.cycle()) {
            let [first, second] = [(); 2].map(|()| delays.below(500));
            let context =
                format!("{backing} {number}{kind}, memory={mode}, after {first} and {second} s");
            // Devices of a paused VM go on, so nothing may arrive between the last snapshot and the dump.
            let saved = host.run(&format!(
                "kind={kind}; request_snapshot; kind=; sleep {first}; request_snapshot; sleep {second}; \
                 request 'POST /v1/pause'; ip link set tap8 down; sleep 0.5; request_snapshot; dump 96; \
                 ip link set tap8 up; finish; ls $to"
            ));
            let again = host.run(&format!(
                "restore ,memory={mode},paused=on || cat /tmp/out; request_snapshot; \
                 cmp /tmp/dump $to/memory-* && echo memory is identical"
            ));
            let resumed = host.run("request 'POST /v1/resume'; rounds 1");

            assert_sound(&saved, &context);
            assert_eq!(saved.matches("data_bytes").count(), 3, "{context}: {saved}");
            assert!(saved.matches("changes-").count() > 1, "{context}: {saved}");
            assert!(again.contains("memory is identical"), "{context}: {saved}{again}");
            assert!(resumed.contains("\"state\":\"running\""), "{context}: {resumed}");
            identical += 1;
        }
        assert_sound(&host.run("finish"), backing);
    }
    assert!(identical > 0, "GRANULE_BACKING is no backing of this test");
    println!("{identical} incremental snapshots have the memory of the process");
}

#[test]
#[ignore = "boots an emulated host and many guests: minutes"]
fn a_process_that_ends_while_it_saves_leaves_a_whole_snapshot() {
    let kills = number_in("GRANULE_KILLS", 24);
    let mut delays = Delays::new();
    let mut host = EmulatedHost::boot();
    host.prepare_guest(SHELL_FUNCTIONS);
    // A restored guest saves to its own directory.
    host.run("start --memory 96M; rounds 1; request_snapshot; finish; other=$to");
    let ways = [
        ("restore; rounds 1", "POST /v1/snapshot"),
        ("restore; rounds 1", "POST /v1/snapshot/live"),
        (
            "snapshot=,incremental=on; restore; rounds 1; request_snapshot; rounds 1",
            "POST /v1/snapshot",
        ),
    ];
    // All but the first add a file of changes.
    let has_changes = |files: &str| files.contains("changes-");
    let durations = [0, 1, 2].map(|way| {
        let (prepare, request) = ways[way];
        host.run(&format!("{prepare}; snapshot="));
        let output = host.run(&format!(
            "begun=$(date +%s%3N); request '{request}'; echo \"duration=$(($(date +%s%3N) - begun))=\""
        ));
        let files = host.run("finish; ls $to");
        assert!(output.contains("data_bytes"), "{request}: {output}");
        assert_eq!(has_changes(&files), way > 0, "{request}: {files}");
        parse_number(&output, "duration")
    });
    // Counts of earlier and new snapshots that are left, by signal.
    let mut left = [("KILL", 137, [0, 0]), ("TERM", 0, [0, 0])];

    for kill in 0..kills {
        let (signal, status, counts) = &mut left[usize::from(kill % 2 == 1)];
        let way = usize::try_from(kill / 2 % 3).unwrap();
        let ((prepare, request), duration) = (ways[way], durations[way]);
        let delay = delays.below(duration + duration / 4);
        let context = format!("{signal} {kill} after {delay} of {duration} ms of way {way}");
        let killed = host.run(&format!(
            "{prepare}; snapshot=; end_while_saving {signal} {delay} '{request}'; ls $to"
        ));
        // The next save works, and removes what the kill has left.
        let restored = host.run("restore; rounds 1; request_snapshot; rounds 1; finish; ls $to");

        assert_eq!(parse_number(&killed, "status"), *status, "{context}: {killed}");
        assert!((1..12).contains(&parse_number(&killed, "rounds")), "{context}: {killed}");
        assert!(!killed.contains("differs"), "{context}: {killed}");
        assert_sound(&restored, &format!("{context}: {killed}"));
        assert!(restored.contains("data_bytes"), "{context}: {restored}");
        assert_eq!(restored.matches("memory-").count(), 1, "{context}: {restored}");
        assert_eq!(restored.matches("changes-").count(), 0, "{context}: {restored}");
        let [before, after] = ["before", "after"].map(|name| parse_number(&killed, name));
        // An answer says that the new snapshot is the one of the directory.
        assert!(after != before || parse_number(&killed, "answered") == 0, "{context}: {killed}");
        if after != before {
            assert_eq!(has_changes(&killed), way > 0, "{context}: {killed}");
        }
        counts[usize::from(after != before)] += 1;
    }
    if kills >= 12 {
        let has_both = [0, 1].map(|which| left.iter().any(|(_, _, counts)| counts[which] > 0));
        assert_eq!(has_both, [true; 2], "no signal came before, or none after the end: {left:?}");
    }
    println!("{kills} signals within {durations:?} ms; earlier and new snapshots left: {left:?}");
}
