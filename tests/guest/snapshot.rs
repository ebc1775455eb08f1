// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Snapshots of a guest that uses memory, disk, entropy and console, and restores of it on each
//! backing, in confined processes without privileges.

use granule_types::testing::skip;

use super::host::EmulatedHost;

/// Functions of the host's shell. `prepare` builds the guest's initramfs; `start OPTIONS` and
/// `restore VALUE OPTION` run the guest, with the options of `--snapshot` in `$snapshot` and variables of
/// its init in `$environment`; `save` takes a snapshot between two of its rounds and stops it;
/// `increments` takes snapshots while it runs; `alter SED` edits the saved state, with its checksum.
/// In each round the guest changes memory and has its disk fill pages of the page cache.
const SHELL_FUNCTIONS: &str = r#"
prepare() {
    install_programs /bin/busybox
    modules virtio_mmio virtio_blk virtio_rng
    pack_guest_with_disk <<'INIT'
busybox dd if=/dev/urandom of=/data bs=1000000 count=8 2>/dev/null
for copy in $(busybox seq ${fill:-0}); do busybox cat /data; done >/fill
sum=$(busybox md5sum </data)
cache() { busybox dd if=/dev/vda bs=4096 count=64 skip=$((round % 16 * 64)) 2>/dev/null | busybox md5sum; }
round=0
cached=$(cache)
while :; do
    [ "$(cache)" = "$cached" ] || echo "page cache differs"
    round=$((round + 1))
    busybox dd if=/dev/urandom of=/part bs=4096 count=64 2>/dev/null
    busybox dd if=/part of=/dev/vda bs=4096 seek=$((round % 16 * 64)) conv=fsync 2>/dev/null
    busybox dd if=/dev/vda of=/read bs=4096 count=64 skip=$((round % 16 * 64)) iflag=direct 2>/dev/null
    busybox cmp /part /read || echo "disk differs"
    echo 1 >/proc/sys/vm/drop_caches
    cached=$(cache)
    [ "$(busybox md5sum </data)" = "$sum" ] || echo "memory differs"
    busybox dd if=/part of=/data bs=4096 seek=$((round % 16 * 64)) conv=notrunc 2>/dev/null
    sum=$(busybox md5sum </data)
    forks=$(busybox dmesg | busybox grep -c 'reseeded due to virtual machine fork')
    busybox grep -q vmgenid /proc/interrupts || forks=unnoticed
    echo "round $round has ended, $(busybox nproc) CPUs, up $(busybox cut -d. -f1 /proc/uptime) s, Linux $(busybox uname -r), forks $forks ."
done
INIT
    dd if=/dev/zero of=/tmp/disk bs=1M count=4 2>/dev/null
    chmod 666 /tmp/disk && mkdir /tmp/run && chmod 777 /tmp/run
}
run() { run_with_socket --snapshot "/tmp/run/saved$snapshot" "$@"; }
start() {
    mkdir -p /tmp/run/saved && chmod 777 /tmp/run/saved
    run --kernel /mnt/vmlinuz --initrd /tmp/small.cpio --cmdline "console=ttyS0 quiet $environment" \
        --disk /tmp/disk --balloon on --vcpus 2 "$@"
}
restore() { run --restore "/tmp/run/saved$1" $2; }
rounds() {
    until [ "$(grep -ac 'has ended' /tmp/out)" -ge $1 ]; do
        kill -0 $pid 2>/dev/null || break; sleep 0.3
    done
}
increments() {
    for number in 1 2 3 4 5; do
        rounds $number
        start=$(date +%s%N)
        request 'POST /v1/snapshot' | grep -a _bytes
        echo "$((($(date +%s%N) - start) / 1000000)) ms"
    done
}
stop() {
    request 'POST /v1/stop' >/dev/null
    wait $pid; echo "status=$?"
    grep -a 'has ended\|differs\|granule:' /tmp/out | tail -n 4
}
alter() {
    sed -n 2p /tmp/run/saved/state.jsonl | sed "$1" | tr -d '\n' >/tmp/state
    crc=$(gzip -c /tmp/state | tail -c 8 | od -A n -N 4 -t x4 | tr -d ' ')
    printf '{"format":"granule.snapshot/2","bytes":%d,"crc32":"%s"}\n' \
        $(stat -c %s /tmp/state) $crc | cat - /tmp/state >/tmp/run/saved/state.jsonl
}
save() {
    request 'POST /v1/pause' >/dev/null
    request_snapshot
    stop
    rm -f /tmp/run/vm.sock; ls /tmp/run/saved
}
"#;

/// Seconds between a snapshot and its restore.
const SECONDS_BETWEEN: u32 = 1000;

/// Returns the last number behind a word in the guest's output.
fn last_number(word: &str, output: &str) -> u32 {
    let numbers = output.split(word).skip(1);
    let number = numbers.last().and_then(|rest| rest.split(' ').next());
    number.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("no {word}: {output}"))
}

/// Returns the number of the last round in the guest's output.
fn last_round(output: &str) -> u32 {
    last_number("round ", output)
}

#[test]
#[ignore = "boots an emulated host: minutes"]
fn a_guest_continues_from_its_snapshot_on_each_backing() {
    let mut host = EmulatedHost::boot();
    host.prepare_guest(SHELL_FUNCTIONS);
    host.run("echo 110 >/proc/sys/vm/nr_hugepages");
    for (backing, modes) in [
        ("4k", [",memory=map", ",memory=userfaultfd"]),
        ("thp", ["", ",memory=userfaultfd"]),
        ("2m", [",memory=userfaultfd", ""]),
        ("4k,shared=on", ["", ",memory=userfaultfd"]),
    ] {
        host.run(&format!("start --memory 192M,backing={backing}; rounds 2"));
        let mut output = host.run("save");
        let (mut round, mut uptime) = (last_round(&output), last_number(", up ", &output));
        for mode in modes {
            assert!(output.contains("data_bytes"), "{backing}: {output}");
            host.run(&format!("sleep {SECONDS_BETWEEN}; restore {mode}; rounds 2"));
            output = host.run("save");

            assert!(output.contains("status=0"), "{backing}{mode}: {output}");
            assert!(!output.contains("differs"), "{backing}{mode}: {output}");
            let next = last_round(&output);
            assert!((round + 2..round + 20).contains(&next), "{backing}{mode}: {output}");
            round = next;
            // The guest's clock has stopped in between.
            let next = last_number(", up ", &output);
            assert!(
                (uptime..uptime + SECONDS_BETWEEN).contains(&next),
                "{backing}{mode}: {output}"
            );
            uptime = next;
        }
        // The state and one memory file.
        assert_eq!(output.matches("memory-").count(), 1, "{output}");
        host.run("rm -r /tmp/run/saved");
    }
}

#[test]
#[ignore = "boots an emulated host: minutes"]
fn a_restored_guest_reseeds_its_generator() {
    let mut host = EmulatedHost::boot();
    host.prepare_guest(SHELL_FUNCTIONS);
    host.run("start --memory 192M; rounds 2");
    let mut output = host.run("save");
    // The driver uses the device tree since Linux 6.10.
    if output.contains("Linux 5.") || output.contains("Linux 6.1.") {
        skip(
            "the guest's kernel is older than 6.10: \
             GRANULE_GUEST=\"$(scripts/guest --suite trixie)\"",
        );
        return;
    }
    assert_eq!(last_number("forks ", &output), 0, "{output}");

    // The second VM is one of a snapshot of the first, which has reseeded once.
    for forks in [1, 2] {
        host.run("restore; rounds 2");
        output = host.run("save");

        assert_eq!(last_number("forks ", &output), forks, "{output}");
    }
}

/// Returns the numbers of this name in answers of the control socket.
fn numbers(output: &str, name: &str) -> Vec<u64> {
    let before = format!("\"{name}\":");
    let answers = output.split(&before).skip(1);
    answers.map(|rest| rest.split([',', '}']).next().unwrap().parse().unwrap()).collect()
}

#[test]
#[ignore = "boots an emulated host: minutes"]
fn a_guest_continues_from_incremental_snapshots_in_each_mode() {
    let mut host = EmulatedHost::boot();
    host.prepare_guest(SHELL_FUNCTIONS);
    // Five incremental snapshots have less than half of the data with nine copies of a file.
    host.run("echo 170 >/proc/sys/vm/nr_hugepages; environment=fill=9");
    let modes = ["", ",memory=map", ",memory=userfaultfd"];
    for (backing, modes) in [("4k", &modes[..]), ("2m", &modes[2..])] {
        host.run(&format!("snapshot=,incremental=on; start --memory 320M,backing={backing}"));
        let mut output = host.run("increments");
        output += &host.run("rounds 6; save");

        let written = numbers(&output, "written_bytes");
        assert_eq!(written.len(), 6, "{output}");
        assert!(written[1..].iter().all(|bytes| bytes * 3 < written[0]), "{output}");
        assert!(!output.contains("differs"), "{output}");
        for file in ["memory-0", "changes-1", "changes-5", "state.jsonl"] {
            assert!(output.contains(file), "{file}: {output}");
        }
        let round = last_round(&output);
        for mode in modes {
            let damaged = host.run(&format!(
                "changes=/tmp/run/saved/changes-2; cp $changes /tmp/kept; truncate -s -8 $changes; \
                 restore {mode}; wait $pid; echo status=$?; cat /tmp/out; cat /tmp/kept >$changes"
            ));
            assert!(damaged.contains("status=2"), "{mode}: {damaged}");
            assert!(damaged.contains("changes-2\n  because: it is truncated"), "{mode}: {damaged}");

            let output = host.run(&format!("restore {mode}; rounds 2; stop"));

            assert!(output.contains("status=0"), "{backing}{mode}: {output}");
            assert!(!output.contains("differs"), "{backing}{mode}: {output}");
            assert!(last_round(&output) >= round + 2, "{backing}{mode}: {output}");
        }
        // The first snapshot of a restored VM has all memory.
        let output = host.run("restore; rounds 1; save");
        assert_eq!(output.matches("changes-").count(), 0, "{output}");
        host.run("rm -r /tmp/run/saved; snapshot=");
    }
}

#[test]
#[ignore = "boots an emulated host: minutes"]
fn a_live_snapshot_stops_the_guest_for_its_changes_only() {
    let mut host = EmulatedHost::boot();
    host.prepare_guest(SHELL_FUNCTIONS);
    host.run("environment=fill=5");
    for (backing, options, modes) in [
        ("thp", "", ["", ",memory=userfaultfd"]),
        ("4k", "", ["", ",memory=map"]),
        ("4k", ",incremental=on", [",memory=userfaultfd", ",memory=map"]),
    ] {
        host.run(&format!("snapshot={options}; start --memory 256M,backing={backing}; rounds 1"));
        let full = host.run("request 'POST /v1/snapshot'");
        let live = host.run("rounds 2; request 'POST /v1/snapshot/live'; request 'GET /v1/state'");
        let is_logging = !options.is_empty();
        assert!(live.contains(&format!("\"dirty_logging\":{is_logging}")), "{live}");
        let [full, live] = [full, live].map(|answer| numbers(&answer, "paused_us"));
        println!("{backing}{options}: stopped for {full:?} and {live:?} us");
        assert!(live[0] * 2 < full[0], "{backing}: {live:?} {full:?}");
        let output = host.run("stop; ls /tmp/run/saved");
        assert_eq!(output.matches("memory-").count(), 1, "{output}");
        assert_eq!(output.matches("changes-").count(), 1, "{output}");
        let round = last_round(&output);
        for mode in modes {
            let output = host.run(&format!("snapshot=; restore {mode}; rounds 2; stop"));

            assert!(output.contains("status=0"), "{backing}{mode}: {output}");
            assert!(!output.contains("differs"), "{backing}{mode}: {output}");
            assert!(last_round(&output) + 20 > round, "{backing}{mode}: {output}");
        }
        host.run("rm -r /tmp/run/saved");
    }
}

#[test]
#[ignore = "boots an emulated host: minutes"]
fn what_does_not_fit_is_refused_and_the_snapshot_stays() {
    let mut host = EmulatedHost::boot();
    host.prepare_guest(SHELL_FUNCTIONS);
    host.run("start --memory 192M; rounds 1");
    let output = host.run("save");
    assert!(output.contains("data_bytes"), "{output}");

    // States of hosts with other pages, another CPU, another counter and another GIC, which is refused
    // before memory is read, and of other VMs; the last edit changes nothing.
    for (edit, expected) in [
        ("s/\"page_size\":4096/\"page_size\":65536/", "host with pages of 64K"),
        ("s/\\(13c030\":\"\\)[0-9a-f]*/\\1efcdab8967452301/", "0x123456789abcdef"),
        ("s/\"counter_frequency\":[0-9]*/\"counter_frequency\":1/", "by a counter of 1 Hz"),
        (
            "s/\"zones\":\\[{\"start\":[0-9]*/\"zones\":[{\"start\":4096/",
            "memory zones are not those",
        ),
        ("s/\"vcpus\":2,/\"vcpus\":1,/", "it has 2 vCPUs, and this VM has 1"),
        ("s/\"affinity\":\"0x0\"/\"affinity\":\"0x5\"/", "affinities [5, "),
        (
            "s/\"memory_crc\":[0-9]*/\"memory_crc\":1/;s/\"interrupts\":[0-9]*/\"interrupts\":992/",
            "interrupts 992 in the snapshot",
        ),
        (
            "s/\"memory_crc\":[0-9]*/\"memory_crc\":1/;s/\"iidr\":\"0x[0-9a-f]/\"iidr\":\"0x9/",
            "distributor register 0x8",
        ),
        (
            "s/\"memory_crc\":[0-9]*/\"memory_crc\":1/;s/\\(13c664\":\"0x\\)[0-9a-f]*/\\1700/",
            "CPU interface register 0xc664",
        ),
        ("s/\"memory_crc\":[0-9]*/\"memory_crc\":1/", "is damaged"),
        // A snapshot of an earlier version, whose guest has no generation.
        ("s/,\"vmgenid\":\"vm_generation\"//", "booted without a VM generation"),
        ("", "has ended"),
    ] {
        let output = host.run(&format!(
            "cp /tmp/run/saved/state.jsonl /tmp/kept; alter '{edit}'; \
             restore; rounds 1; request 'POST /v1/stop' >/dev/null 2>&1; wait $pid; \
             echo status=$?; cat /tmp/out; cat /tmp/kept >/tmp/run/saved/state.jsonl"
        ));
        let is_restored = edit.is_empty() || edit.contains("vmgenid");
        let status = if is_restored { "status=0" } else { "status=2" };
        assert!(output.contains(status), "{edit}: {output}");
        assert!(output.contains(expected), "{edit}: {output}");
    }
    // What the snapshot names is opened without the privileges of root.
    for (option, status, expected) in [
        ("", "status=2", "/tmp/disk cannot be opened"),
        ("--disk=/tmp/disk,readonly=on", "status=2", "disk 1 with readonly=off"),
        ("--disk=/tmp/disk", "status=0", "has ended"),
    ] {
        let output = host.run(&format!(
            "chmod 600 /tmp/disk; restore '' {option}; rounds 1; \
             request 'POST /v1/stop' >/dev/null 2>&1; wait $pid; echo status=$?; cat /tmp/out; \
             chmod 666 /tmp/disk"
        ));
        assert!(output.contains(status), "{option}: {output}");
        assert!(output.contains(expected), "{option}: {output}");
    }
    for (damage, expected) in [
        ("truncate -s 8M /tmp/disk", "another size"),
        (
            "truncate -s 4M /tmp/disk; printf x | dd of=$memory bs=1 seek=50000000 conv=notrunc",
            "damaged",
        ),
        ("truncate -s 1M $memory", "1048576 bytes instead of"),
    ] {
        let output = host.run(&format!(
            "memory=$(ls /tmp/run/saved/memory-*); ({damage}) 2>/dev/null; \
             restore; wait $pid; echo status=$?; cat /tmp/out"
        ));
        assert!(output.contains("status=2"), "{output}");
        assert!(output.contains(expected), "{output}");
    }
    let output = host.run("ls /tmp/run/saved");
    assert!(output.contains("state.jsonl"), "{output}");
}
