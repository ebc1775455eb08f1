// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kills `granule run` at random times and checks the disk and the next run.
//!
//! The guest is Debian's kernel with a shell that writes consecutive numbers to its disk, flushes
//! each, and prints it as safe. Half of the runs are killed during the start, half while the guest
//! writes. `GRANULE_KILLS` sets the number of runs. Each run starts as root and changes to a user
//! without access to disk and tap. A second test boots the same guest with a GICv2.

use std::env;

use super::host::{EmulatedHost, parse_number};

/// Functions of the host's shell. `prepare` builds the guest's initramfs; `run` starts a guest
/// (`run again` one that reboots first); `kill_guest SECONDS start|work` kills a guest and prints
/// its exit code, the last safe number, and the number in that number's sector.
const SHELL_FUNCTIONS: &str = r#"
prepare() {
    install_programs /bin/busybox
    modules virtio_mmio virtio_blk
    pack <<'INIT'
#!/bin/busybox sh
busybox mount -t devtmpfs dev /dev
exec >/dev/console 2>&1
for module in /m/*; do busybox insmod $module; done
until [ -b /dev/vda ]; do busybox sleep 0.1; done
busybox mount -t proc proc /proc
busybox grep virtio /proc/interrupts
if busybox grep -q again /proc/cmdline; then
    case $(busybox dd if=/dev/vda bs=16 count=1 2>/dev/null) in
    once*) echo second boot ;;
    *) printf once | busybox dd of=/dev/vda bs=512 conv=sync,fsync 2>/dev/null; busybox reboot -f ;;
    esac
fi
i=0
while :; do
    i=$((i + 1))
    printf '%016d' $i | busybox dd of=/dev/vda bs=512 seek=$((i % 64)) conv=sync,fsync 2>/dev/null &&
        echo "safe $i"
done
INIT
}
run() {
    rm -f /tmp/disk && truncate -s 32768 /tmp/disk
    : >/tmp/out # The output of the last run must not count.
    /mnt/granule run --kernel /mnt/vmlinuz --initrd /tmp/small.cpio --disk /tmp/disk \
        --net tap=killed --api-socket /tmp/vm.sock --memory 128M --user nobody \
        --cmdline "console=ttyS0 quiet $1" </dev/null >/tmp/out 2>/tmp/err &
    pid=$!
}
wait_until_safe() {
    until grep -aq safe /tmp/out; do kill -0 $pid || break; sleep 0.1; done
}
kill_guest() {
    run
    [ $2 = start ] || wait_until_safe
    sleep $1
    kill -9 $pid; wait $pid 2>/dev/null; echo "status=$?"
    last=$(tr -d '\r' </tmp/out | grep -a '^safe ' | tail -n 1 | tr -dc 0-9)
    echo "safe=${last:-0}="
    found=$(dd if=/tmp/disk bs=512 skip=$((${last:-0} % 64)) count=1 2>/dev/null | head -c 16 | tr -dc 0-9)
    echo "found=${found:-0}="
    cat /tmp/err
}"#;

#[test]
#[ignore = "boots an emulated host: minutes"]
fn a_guest_has_a_gicv2_on_a_host_without_gicv3() {
    let mut host = EmulatedHost::boot_with_gic(2);
    host.prepare_guest(SHELL_FUNCTIONS);

    let output = host.run("run; wait_until_safe; cat /tmp/out /tmp/err");

    // Linux names the interrupts of a GICv2 `GIC-0`, those of a GICv3 `GICv3`.
    assert!(output.contains("GIC-0") && output.contains("safe 1"), "{output}");

    // It cannot be saved, and goes on.
    let output = host.run(
        "kill $pid; wait $pid; mkdir -m 777 /tmp/run; \
         run_with_socket --snapshot /tmp/run/saved --kernel /mnt/vmlinuz --initrd /tmp/small.cpio \
             --disk /tmp/disk --memory 128M --cmdline 'console=ttyS0 quiet'; \
         wait_until_safe; request 'POST /v1/snapshot' 'GET /v1/state'",
    );
    assert!(output.contains("snapshots need a GICv3"), "{output}");
    assert!(output.contains("\"state\":\"running\""), "{output}");
}

#[test]
#[ignore = "boots an emulated host and many guests: an hour"]
fn a_run_after_a_kill_works_and_keeps_flushed_data() {
    let kills: u64 = env::var("GRANULE_KILLS").map_or(100, |text| text.parse().unwrap());
    let mut host = EmulatedHost::boot();
    host.prepare_guest(SHELL_FUNCTIONS);
    let mut random = 1u64;
    let mut safe = 0;

    for kill in 0..kills {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let when = ["start", "work"][usize::from(kill % 2 == 1)];
        let delay = format!("{}.{:03}", random % 3, random / 3 % 1000);
        let output = host.run(&format!("kill_guest {delay} {when}"));

        assert_eq!(parse_number(&output, "status"), 137, "kill {kill}: {output}");
        let (last, found) = (parse_number(&output, "safe"), parse_number(&output, "found"));
        assert!(found >= last, "kill {kill}: {last} is lost: {output}");
        assert!(when == "start" || last > 0, "kill {kill}: {output}");
        safe += last;
    }

    // The last guest keeps its disk across a reboot, although its user cannot open the disk.
    let output = host.run("run again; wait_until_safe; grep -ac 'second boot' /tmp/out");
    assert_eq!(output.trim(), "1");
    let output = host.run("grep -e ^Uid -e ^Groups -e ^CapEff /proc/$pid/status");
    let output: Vec<&str> = output.split_whitespace().collect();
    let nobody = ["Uid:", "65534", "65534", "65534", "65534", "Groups:", "CapEff:"];
    assert_eq!(output[..7], nobody, "{output:?}");
    assert_eq!(output[7..], ["0000000000000000"], "{output:?}");
    let output = host.run(
        "kill $pid; wait $pid; echo \"status=$?\"; cat /tmp/err; \
         ls /tmp/vm.sock /sys/class/net/killed 2>&1 | grep -c cannot",
    );
    assert_eq!(parse_number(&output, "status"), 0, "{output}");
    assert!(output.contains("SIGTERM") && output.trim_end().ends_with('2'), "{output}");
    println!("{kills} kills, {safe} writes safe");
}
