// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Vsock connections between a guest and its host. Either side connects, and data flows in both
//! directions at once, in two boots of one VM and in the next VM.

use super::host::EmulatedHost;

/// Functions of the host's shell. `prepare` builds the guest's initramfs; `run` starts a guest that
/// connects to the host, accepts a connection, and runs commands; `exchange BOOT` transfers data
/// on the host and prints the checksums of data sent and received; `send_command WORD [CID]` sends a
/// command; `hold` makes the guest print what the host writes to file descriptor 9.
const SHELL_FUNCTIONS: &str = r#"
prepare() {
    cat >/tmp/peer <<'PEER'
my ($how, $cid, $port) = @ARGV;
socket(my $socket, 40, 1, 0) or die "socket: $!\n";
my $address = pack("S S L L x4", 40, 0, $port, $cid);
if ($how eq "listen") {
    bind($socket, $address) or die "bind: $!\n";
    listen($socket, 1) or die "listen: $!\n";
    print STDERR "listening at $port\n";
    accept(my $peer, $socket) or die "accept: $!\n";
    $socket = $peer;
} else {
    connect($socket, $address) or die "connect: $!\n";
}
sub pass {
    my ($from, $to) = @_;
    while (my $count = sysread($from, my $bytes, 65536)) {
        for (my $done = 0; $done < $count;) {
            $done += syswrite($to, $bytes, $count - $done, $done) || die "write: $!\n";
        }
    }
}
my $sender = fork;
if ($sender == 0) { pass(\*STDIN, $socket); shutdown($socket, 1); exit }
pass($socket, \*STDOUT);
waitpid($sender, 0);
exit($? != 0);
PEER
    install_programs /bin/busybox /usr/bin/perl && cp /tmp/peer /tmp/g/
    modules virtio_mmio vmw_vsock_virtio_transport
    pack <<'INIT'
#!/bin/busybox sh
busybox mount -t devtmpfs dev /dev
exec </dev/null >/dev/console 2>&1
for module in /m/*; do busybox insmod $module; done
busybox dd if=/dev/urandom of=/in bs=1000 count=400 2>/dev/null
print_checksums() { echo "guest sent $(busybox md5sum </in) received $(busybox md5sum </out)"; }
perl /peer connect 2 5000 </in >/out && print_checksums
perl /peer listen 4294967295 6000 </in >/out && print_checksums
while word=$(perl /peer listen 4294967295 6001); do
    echo "command <$word>"
    case $word in
    reboot) busybox reboot -f ;;
    hold) (perl /peer connect 2 5001 </dev/null; echo "connection has ended") & ;;
    esac
done
while :; do busybox sleep 1000; done
INIT
    dd if=/dev/urandom of=/tmp/in bs=1000 count=400 2>/dev/null
}
granule() {
    exec /mnt/granule run --kernel /mnt/vmlinuz --initrd /tmp/small.cpio --memory 96M --memory 64M \
        --cmdline "console=ttyS0 quiet" --user nobody --vsock cid=42 "$@" </dev/null
}
listen() {
    perl /tmp/peer listen 4294967295 5000 </tmp/in >/tmp/received 2>/dev/null &
    listener=$!
}
run() {
    out=/tmp/out; : >$out # The output of the last run must not count.
    listen
    granule "$@" >$out 2>/tmp/err &
    pid=$!
}
restore() {
    out=/tmp/restored; : >$out
    /mnt/granule run --restore /tmp/run/saved --user nobody "$@" </dev/null >$out 2>&1 &
    pid=$!
}
hold() {
    mkfifo /tmp/fifo
    perl /tmp/peer listen 4294967295 5001 </tmp/fifo >/dev/null 2>&1 &
    exec 9>/tmp/fifo
    send_command hold
}
print_checksums() { echo "host sent $(md5sum </tmp/in) received $(md5sum </tmp/received)"; }
until_printed() {
    until [ "$(grep -ac "$1" $out)" -ge $2 ]; do
        kill -0 $pid 2>/dev/null || break; sleep 0.5
    done
}
exchange() {
    until_printed 'listening at 6000' $1
    wait $listener && print_checksums
    perl /tmp/peer connect 42 6000 </tmp/in >/tmp/received && print_checksums
    until_printed 'listening at 6001' $1
    grep -a 'guest sent' $out | tail -n 2; cat /tmp/err
}
send_command() { echo $1 | perl /tmp/peer connect ${2:-42} 6001; }
stop_guest() { kill $1 $pid; wait $pid; echo "status=$?"; cat /tmp/err; true; }
"#;

/// Parses the checksums of data sent and received by a side, one pair for each connection.
fn parse_checksums<'a>(output: &'a str, side: &str) -> Vec<(&'a str, &'a str)> {
    let start = format!("{side} sent ");
    let rows = output.split(start.as_str()).skip(1);
    rows.map(|row| {
        let mut words = row.split_whitespace().filter(|word| word.len() == 32);
        (words.next().unwrap(), words.next().unwrap())
    })
    .collect()
}

#[test]
#[ignore = "boots an emulated host: minutes"]
fn data_flows_both_ways_in_each_boot_and_the_cid_is_released() {
    let mut host = EmulatedHost::boot();
    host.prepare_guest(SHELL_FUNCTIONS);
    let output = host.run("(granule) 2>&1; echo status=$?");
    assert!(output.contains("modprobe vhost_vsock"), "{output}");
    assert!(output.contains("status=2"), "{output}");
    host.run("modprobe vhost_vsock");

    host.run("run");
    for boot in 1..3 {
        let output = host.run(&format!("exchange {boot}"));
        let [host_sums, guest_sums] = ["host", "guest"].map(|side| parse_checksums(&output, side));
        assert_eq!((host_sums.len(), guest_sums.len()), (2, 2), "{output}");
        for (host_sum, guest_sum) in host_sums.into_iter().zip(guest_sums) {
            assert_eq!(host_sum, (guest_sum.1, guest_sum.0), "{output}");
            assert_ne!(host_sum.0, host_sum.1, "{output}");
        }
        if boot == 1 {
            host.run("listen; send_command reboot");
        }
    }

    let output = host.run("(granule) 2>&1; echo status=$?");
    assert!(output.contains("the CID 42 is taken"), "{output}");
    assert!(output.contains("status=2"), "{output}");
    let output = host.run("stop_guest -TERM");
    assert!(output.contains("stopped by SIGTERM"), "{output}");
    assert!(output.contains("status=0"), "{output}");
    for signal in ["-KILL", "-TERM"] {
        host.run("run");
        let output = host.run("exchange 1");
        assert_eq!(parse_checksums(&output, "guest").len(), 2, "{output}");
        host.run(&format!("stop_guest {signal}"));
    }
}

#[test]
#[ignore = "boots an emulated host: minutes"]
fn connections_go_on_after_a_snapshot_and_are_closed_in_a_restored_guest() {
    let mut host = EmulatedHost::boot();
    host.prepare_guest(SHELL_FUNCTIONS);
    host.run("modprobe vhost_vsock; mkdir -m 777 /tmp/run");
    host.run("run --api-socket /tmp/run/vm.sock --snapshot /tmp/run/saved; exchange 1");
    host.run("hold; echo first >&9; until_printed first 1");

    let output = host.run("request 'POST /v1/snapshot'; echo second >&9; until_printed second 1");
    assert!(output.contains("data_bytes"), "{output}");
    let output = host.run("send_command more; until_printed '<more>' 1; cat /tmp/out /tmp/err");
    assert!(output.contains("second"), "{output}");
    assert!(output.contains("<more>"), "{output}");
    assert!(!output.contains("has ended"), "{output}");

    let output = host.run("restore; wait $pid; echo status=$?; cat $out");
    assert!(output.contains("the CID 42 is taken"), "{output}");
    host.run("restore --vsock cid=43; until_printed 'has ended' 1");
    let output = host.run("send_command again 43; until_printed '<again>' 1; cat $out");
    assert!(output.contains("connection has ended"), "{output}");
    assert!(output.contains("<again>"), "{output}");
    // The VM that was saved still has its connection.
    let output = host.run("out=/tmp/out; echo third >&9; until_printed third 1; cat $out");
    assert!(output.contains("third"), "{output}");
    assert!(!output.contains("has ended"), "{output}");
}
