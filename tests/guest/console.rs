// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest's console that is read to some point and no further, as a serial port and as a virtio
//! console: what was typed reaches the guest, and then it says more than anybody reads. The machine
//! can be paused, resumed and ended all the same. A machine that is being built can be ended too.
//! What a booting guest writes is in the dirty log, zone by zone.

use super::{host::Host, small};

/// Functions for the host's shell. `prepare` makes the guest's initramfs; `run OPTIONS` starts a
/// guest whose reader stalls behind its first lines; `ask PATH` asks the control socket.
const FUNCTIONS: &str = r#"
prepare() {
    lay /bin/busybox
    modules virtio_mmio virtio_console
    pack <<'INIT'
#!/bin/busybox sh
busybox mount -t devtmpfs dev /dev
busybox mount -t proc proc /proc
for module in /m/*; do busybox insmod $module; done
tty=/dev/$(busybox sed 's/.*console=\([a-zA-Z0-9]*\).*/\1/' /proc/cmdline)
until [ -c $tty ]; do busybox sleep 0.1; done
exec <$tty >$tty 2>&1
echo "$tty is up"
read line
echo "heard <$line>"
while :; do echo "more than anybody reads"; done
INIT
}
run() {
    rm -f /tmp/in /tmp/out && : >/tmp/head && mkfifo /tmp/in /tmp/out
    (for line in 1 2 3 4 5 6 7 8 9; do IFS= read -r said; echo "$said" >>/tmp/head; done
        exec tail -f /dev/null) </tmp/out &
    reader=$!
    # A port forgets what came before its driver.
    (until grep -q 'is up' /tmp/head; do sleep 0.2; done
        echo typed; exec tail -f /dev/null) >/tmp/in &
    typist=$!
    /mnt/granule run --kernel /mnt/vmlinuz --initrd /tmp/small.cpio --api-socket /tmp/vm.sock \
        "$@" </tmp/in >/tmp/out 2>/tmp/err &
    pid=$!
}
stalled() {
    until grep -q 'more than' /tmp/head; do kill -0 $pid || break; sleep 2; done
    sleep 20
}
log() {
    until [ -S /tmp/vm.sock ]; do sleep 0.1; done
    ask 'POST /v1/dirty/start'
}
ask() {
    perl -MIO::Socket::UNIX -e '$s = IO::Socket::UNIX->new("/tmp/vm.sock") or die;
        print $s "$ARGV[0] HTTP/1.1\r\nHost: vm\r\nConnection: close\r\n\r\n"; $s->flush;
        while (<$s>) { print; last if /state/ }
        print "\n"' "$1"
}
end() {
    begun=$(date +%s)
    kill $pid; wait $pid; echo "status=$? after $(($(date +%s) - begun)) s"
    kill $reader $typist
    cat /tmp/head /tmp/err
    ls /tmp/vm.sock
    true
}"#;

/// The body of an answer.
fn json(answer: &str) -> serde_json::Value {
    let body = answer.find('{').map_or("", |start| &answer[start..]);
    serde_json::from_str(body.trim()).unwrap_or_else(|error| panic!("{error}: {answer}"))
}

#[test]
#[ignore = "boots an emulated host: minutes"]
fn a_console_that_is_not_read_to_its_end_holds_nobody_up() {
    let mut host = Host::boot();
    small::prepare(&mut host, FUNCTIONS);

    for (options, tty) in [
        (
            "--memory 128M --memory 64M --cmdline 'console=ttyS0 quiet'",
            "ttyS0",
        ),
        (
            "--memory 128M --cmdline 'console=ttyAMA0 quiet' --serial pl011",
            "ttyAMA0",
        ),
        (
            "--memory 128M --cmdline 'console=hvc0 quiet' --console virtio",
            "hvc0",
        ),
    ] {
        let logging = host.run(&format!("run {options}; log"));
        host.run("stalled");
        let dirty = json(&host.run("ask 'GET /v1/dirty'"));
        let cleared = json(&host.run("ask 'POST /v1/dirty/clear'"));
        let again = json(&host.run("ask 'GET /v1/dirty'"));
        let paused = host.run("ask 'POST /v1/pause'");
        let resumed = host.run("ask 'POST /v1/resume'");
        let said = host.run("end 2>&1");

        assert!(logging.contains("\"dirty_logging\":true"), "{logging}");
        let zones = dirty["zones"].as_array().unwrap();
        let pages = zones
            .iter()
            .map(|zone| zone["dirty_pages"].as_u64().unwrap());
        let pages: Vec<_> = pages.collect();
        assert_eq!(pages.len(), 1 + usize::from(tty == "ttyS0"), "{dirty}");
        assert!(pages[0] > 1000, "a kernel unpacks itself: {dirty}");
        assert_eq!(dirty["dirty_pages"], pages.iter().sum::<u64>());
        assert_eq!(cleared["dirty_pages"], 0);
        assert!(
            again["dirty_pages"].as_u64().unwrap() < pages[0] / 2,
            "{again}"
        );
        assert!(paused.contains("paused"), "{paused}");
        assert!(resumed.contains("running"), "{resumed}");
        assert!(said.contains("status=0"), "{said}");
        assert!(said.contains(&format!("/dev/{tty} is up")), "{said}");
        assert!(said.contains("heard <typed>"), "{said}");
        assert!(said.contains("found no reader"), "{said}");
        assert!(said.contains("ended by SIGTERM"), "{said}");
        assert!(said.contains("cannot access"), "a socket is left: {said}");
    }

    // Three quarters of a gibibyte are not cleared in that time.
    host.run("run --memory 768M,prefault=on; sleep 0.2");
    let said = host.run("end 2>&1");
    assert!(said.contains("status=0"), "{said}");
    assert!(said.contains("before the guest ran"), "{said}");
    assert!(said.contains("cannot access"), "a socket is left: {said}");
}
