// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule run` killed at random moments, and what the next run finds.
//!
//! The guest is Debian's kernel and a shell that writes one number after the other to its disk,
//! flushes, and says on its console what is safe. Half of the runs are killed while they start, half
//! while the guest writes. `GRANULE_KILLS` says how many there are. All begin as root and become
//! `nobody`, who could open neither disk nor tap. The same guest shows that a GICv2 will do.

use std::env;

use super::{host::Host, small};

/// Functions for the host's shell. `prepare` makes the guest's initramfs; `run` starts a guest
/// (`run again` one that resets itself first);
/// `kill_it SECONDS start|work` kills one and says how it ended, which number was safe, and which
/// one its place on the disk holds.
const FUNCTIONS: &str = r#"
prepare() {
    lay /bin/busybox
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
    once*) echo second life ;;
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
    /mnt/granule run --kernel /mnt/vmlinuz --initrd /tmp/small.cpio --disk /tmp/disk \
        --net tap=killed --api-socket /tmp/vm.sock --memory 128M --user nobody \
        --cmdline "console=ttyS0 quiet $1" </dev/null >/tmp/out 2>/tmp/err &
    pid=$!
}
at_work() {
    until grep -aq safe /tmp/out; do kill -0 $pid || break; sleep 0.1; done
}
kill_it() {
    run
    [ $2 = start ] || at_work
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
fn where_the_host_has_a_gicv2_only_a_guest_gets_one() {
    let mut host = Host::boot_with_gic(2);
    small::prepare(&mut host, FUNCTIONS);

    let said = host.run("run; at_work; cat /tmp/out /tmp/err");

    // Linux's name of one; the other's is GICv3.
    assert!(said.contains("GIC-0") && said.contains("safe 1"), "{said}");
}

/// What stands behind `name=` in what was said.
fn number(said: &str, name: &str) -> u64 {
    let rest = said.split_once(&format!("{name}=")).unwrap().1;
    let digits = rest.split(|c: char| !c.is_ascii_digit()).next().unwrap();
    digits.parse().unwrap()
}

#[test]
#[ignore = "boots an emulated host and many guests: an hour"]
fn whatever_it_is_killed_at_the_next_one_works() {
    let kills: u64 = env::var("GRANULE_KILLS").map_or(100, |text| text.parse().unwrap());
    let mut host = Host::boot();
    small::prepare(&mut host, FUNCTIONS);
    let mut random = 1u64;
    let mut safe = 0;

    for kill in 0..kills {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let when = ["start", "work"][usize::from(kill % 2 == 1)];
        let delay = format!("{}.{:03}", random % 3, random / 3 % 1000);
        let said = host.run(&format!("kill_it {delay} {when}"));

        assert_eq!(number(&said, "status"), 137, "kill {kill}: {said}");
        let (last, found) = (number(&said, "safe"), number(&said, "found"));
        assert!(found >= last, "kill {kill}: {last} is lost: {said}");
        assert!(when == "start" || last > 0, "kill {kill}: {said}");
        safe += last;
    }

    // The last one resets itself, and finds its disk again although nobody could open it.
    let said = host.run("run again; at_work; grep -ac 'second life' /tmp/out");
    assert_eq!(said.trim(), "1");
    let said = host.run("grep -e ^Uid -e ^Groups -e ^CapEff /proc/$pid/status");
    let said: Vec<&str> = said.split_whitespace().collect();
    let nobody = [
        "Uid:", "65534", "65534", "65534", "65534", "Groups:", "CapEff:",
    ];
    assert_eq!(said[..7], nobody, "{said:?}");
    assert_eq!(said[7..], ["0000000000000000"], "{said:?}");
    let said = host.run(
        "kill $pid; wait $pid; echo \"status=$?\"; cat /tmp/err; \
         ls /tmp/vm.sock /sys/class/net/killed 2>&1 | grep -c cannot",
    );
    assert_eq!(number(&said, "status"), 0, "{said}");
    assert!(
        said.contains("SIGTERM") && said.trim_end().ends_with('2'),
        "{said}"
    );
    println!("{kills} kills, {safe} writes safe");
}
