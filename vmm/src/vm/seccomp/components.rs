// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs the components of this crate, without KVM, in the threads and under the filters that
//! `granule run` uses.

use std::{
    fs::{self, File},
    io::{self, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    sync::Arc,
    thread,
    time::Instant,
};

use granule_types::{backing::Backing, record::HostInfo, units::Bytes};
use parking_lot::Mutex;
use serde_json::json;
use vm_memory::Bytes as _;
use vmm_sys_util::{
    eventfd::EventFd,
    signal::{SIGRTMIN, register_signal_handler},
};

use super::{ThreadRole, confine_optionally};
use crate::{
    affinity::{first_cpu, pin_thread},
    arch::MEMORY_START,
    devices::{
        Serial,
        console_input::{InputConsole, PipeSink},
        console_output::ConsoleOutput,
        virtio::{
            balloon::Balloon,
            block::{Block, Disk},
            rng::Rng,
            testing::{Buffer, Driver},
        },
    },
    kvm::stats::Statistics,
    memory::{
        PageSet, changes::Changes, image, layers::LayeredImage, on_demand::OnDemand,
        user_faults::UserFaults,
    },
    vm::{
        api::{ApiServer, BoundSocket},
        api_request::{ApiRequest, Body},
        boot_stats::{BootStats, StatsFile},
        builder::allocate_memory,
        config::{MemoryZone, VmConfig},
        console_io::{self, ConsoleChannels},
        signals::{self, Signals},
        snapshot::{SnapshotDirectory, testing::small_state},
        stats::{HostCounters, StatsReader},
    },
};

/// Opens files as `granule run` does, confines the calling thread and runs all components. The
/// client of the control socket is not confined.
pub(super) fn run_components(folder: &Path) {
    let (socket, disk) = (folder.join("socket"), folder.join("disk"));
    let bound = BoundSocket::new(&socket).unwrap();
    fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let disk = Disk::open(&disk, false).unwrap();
    let stats = StatsFile::open(&folder.join("stats"), HostInfo::of_this_host().unwrap()).unwrap();
    let client = thread::spawn(move || {
        let send = |(request, _)| {
            let mut client = UnixStream::connect(&socket).unwrap();
            write!(client, "{request} HTTP/1.1\r\n\r\n").unwrap();
            io::read_to_string(client).unwrap()
        };
        REQUESTS.map(send).concat()
    });
    let snapshots = SnapshotDirectory::open(&folder.join("snapshots")).unwrap();
    // The host may lack userfaultfd, or the privilege for it.
    let faults = UserFaults::open().ok();
    run_confined(bound, disk, stats, &snapshots, faults);
    let answers = client.join().unwrap();
    assert_eq!(answers.matches("HTTP/1.1 200").count(), REQUESTS.len(), "{answers}");
    assert!(answers.contains("running") && answers.contains("granule_exits_total 7"), "{answers}");
}

/// Requests that the control socket receives.
const REQUESTS: [(&str, ApiRequest); 4] = [
    ("GET /v1/state", ApiRequest::State),
    ("POST /v1/snapshot", ApiRequest::Snapshot),
    ("POST /v1/snapshot/live", ApiRequest::LiveSnapshot),
    ("GET /metrics", ApiRequest::Metrics { mapped: false }),
];

/// Confines the calling thread as the main thread and runs all components.
fn run_confined(
    socket: BoundSocket,
    disk: Disk,
    stats: StatsFile,
    snapshots: &SnapshotDirectory,
    faults: Option<UserFaults>,
) {
    let [image, changes] = [(); 2].map(|()| Arc::new(tempfile::tempfile().unwrap()));
    let signals = Signals::block().unwrap();
    let api = ApiServer::serve(socket, || confine_optionally(true, ThreadRole::Api)).unwrap();
    ThreadRole::Main.confine().unwrap();

    drop(signals.terminate_on_signal(|_| {}).unwrap());
    assert_eq!(signals.next_request(), None);
    for (_, expected) in REQUESTS {
        answer_request(&api, &expected);
    }
    run_console();
    allocate_guest_memory();
    save_and_restore(snapshots, &image, &changes, faults);
    let disk = Driver::new(Box::new(Block::new(disk, "disk0")));
    let entropy = Driver::new(Box::new(Rng));
    let balloon = Driver::new(Box::new(Balloon::default()));
    let vcpu = thread::spawn(move || {
        ThreadRole::Vcpu.confine().unwrap();
        pin_thread(first_cpu()).unwrap();
        drive_devices(disk, entropy, balloon);
    });
    vcpu.join().unwrap();
    write_statistics(stats);
    use_c_library();
    issue_direct_calls();
    signals.release();
}

/// Waits for a request and answers it.
fn answer_request(api: &ApiServer, expected: &ApiRequest) {
    let pending = api.wait_for_request();
    assert_eq!(pending.request, *expected);
    let body = match pending.request {
        ApiRequest::Metrics { .. } => Body::Metrics("granule_exits_total 7".to_owned()),
        _ => json!({ "state": "running" }).into(),
    };
    pending.respond((200, body));
}

/// Writes console output and forwards a line of standard input to a virtio console.
fn run_console() {
    let (mut screen, to) = io::pipe().unwrap();
    let output = ConsoleOutput::new(to, || confine_optionally(true, ThreadRole::Console)).unwrap();
    let mut channels = ConsoleChannels::new(&output, true, None).unwrap();
    channels.serial_output.write_all(b"login: ").unwrap();
    assert_eq!(output.finish(), 0);
    let mut written = [0; 7];
    screen.read_exact(&mut written).unwrap();
    assert_eq!(&written, b"login: ");

    let irq = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    let serial = Serial::new(irq, Box::new(io::sink())).unwrap();
    let serial = Arc::new(Mutex::new(serial));
    let quit = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    let (sink, mut keys) = PipeSink::new().unwrap();
    let console = InputConsole::Virtio(sink, keys.try_clone().unwrap());
    let (serial, earlier) = (serial as _, Vec::new());
    let input =
        console_io::forward_stdin(Some(console), &serial, earlier, None, quit, true).unwrap();
    let mut line = [0; 4];
    keys.read_exact(&mut line).unwrap();
    assert_eq!(&line, b"key\n");
    assert!(input.stop().unread().is_empty());
}

/// Allocates private memory on a NUMA node and shared memory, clears it as after a reset of the guest, and
/// reads the resident pages.
fn allocate_guest_memory() {
    let zone = |backing: &str, node| MemoryZone {
        size: Bytes::mib(4),
        backing: backing.parse().unwrap(),
        prefault: true,
        alignment: None,
        node,
    };
    // A kernel without NUMA refuses the node.
    let _ = allocate_memory(&[zone("anonymous", Some(0))], None);
    let memory = allocate_memory(&[zone("anonymous_thp", None), zone("shmem", None)], None);
    let memory = memory.unwrap();
    memory.clear().unwrap();
    for ram in memory.regions() {
        assert!(!ram.resident_pages().unwrap().resident_bytes.is_empty());
        let _ = ram.collapse(&|| true);
    }
}

/// Writes a snapshot twice, so that the first one is removed, and changes to it, and reads it in each
/// way.
fn save_and_restore(
    directory: &SnapshotDirectory,
    base: &Arc<File>,
    changes: &Arc<File>,
    faults: Option<UserFaults>,
) {
    let zone = |backing| MemoryZone {
        size: Bytes::mib(4),
        backing,
        prefault: false,
        alignment: None,
        node: None,
    };
    for backing in [Backing::Shmem, Backing::Anonymous] {
        let memory = allocate_memory(&[zone(backing)], None).unwrap();
        memory.map().write_obj(7_u64, MEMORY_START).unwrap();
        let (name, file) = directory.create_memory().unwrap();
        image::save(&memory, &directory.page_map, &file, &signals::none_is_pending).unwrap();
        let committed = directory.commit(&file, &small_state(name)).unwrap();
        directory.remove_earlier(&committed);
        image::save(&memory, &directory.page_map, base, &signals::none_is_pending).unwrap();
    }
    let image = save_changes(directory, base, changes, zone(Backing::Anonymous));
    let copied = allocate_memory(&[zone(Backing::Shmem)], None).unwrap();
    image::load(&copied, base, 2).unwrap();
    let zones = [zone(Backing::Anonymous)];
    let mapped = allocate_memory(&zones, Some(Arc::clone(base))).unwrap();
    for memory in [&copied, &mapped] {
        image.apply_changes(memory).unwrap();
    }
    let mut restored = vec![copied, mapped];
    let demand = faults.map(|faults| {
        let memory = allocate_memory(&zones, None).unwrap();
        restored.push(memory.clone());
        OnDemand::start(faults, &memory, image, &[], true, |_| {}).unwrap()
    });
    for memory in restored {
        assert_eq!(memory.map().read_obj::<u64>(MEMORY_START).unwrap(), 7);
    }
    drop(demand);
}

/// Writes the changes of an incremental snapshot, and returns the base with them.
fn save_changes(
    directory: &SnapshotDirectory,
    base: &Arc<File>,
    file: &Arc<File>,
    zone: MemoryZone,
) -> LayeredImage {
    let memory = allocate_memory(&[zone], None).unwrap();
    memory.map().write_obj(7_u64, MEMORY_START).unwrap();
    let mut pages = PageSet::default();
    pages.add(&[0b11]);
    let changes = Changes::find(&memory, &[pages], &directory.page_map).unwrap();
    let (_, new_file) = directory.create_changes().unwrap();
    changes.save(&new_file, &signals::none_is_pending).unwrap();
    let data = changes.save(file, &signals::none_is_pending).unwrap();
    let mut image = LayeredImage::from(Arc::clone(base));
    image.add(Arc::clone(file), data, memory.size()).unwrap();
    image
}

/// Activates and drives devices, as a vCPU thread does for the guest's stores.
fn drive_devices(mut disk: Driver, mut entropy: Driver, mut balloon: Driver) {
    let range = [0_u64.to_le_bytes(), 8_u64.to_le_bytes()].concat();
    let features = disk.offered_features();
    disk.activate(features);
    for (request, data) in [
        (1, Some(Buffer::Out(vec![7; 4096]))),
        (4, None),
        (0, Some(Buffer::In(4096))),
        (11, Some(Buffer::Out(range.clone()))),
        (13, Some(Buffer::Out(range))),
    ] {
        let mut buffers = vec![Buffer::block_header(request, 0)];
        buffers.extend(data);
        buffers.push(Buffer::In(1));
        let (answers, _) = disk.request(0, &buffers);
        assert_eq!(answers.last().unwrap(), &[0], "request {request}");
    }
    // A reset stops the device's thread.
    disk.write_register(0x70, 0);

    entropy.activate(0);
    let (bytes, _) = entropy.request(0, &[Buffer::In(64)]);
    assert_ne!(bytes[0], [0; 64]);
    let features = balloon.offered_features();
    balloon.activate(features);
    balloon.request(0, &[Buffer::Out(0x4_0400_u32.to_le_bytes().to_vec())]);
    balloon.write_register(0x70, 0);
}

/// Reads the statistics of a VM and writes those of a boot.
fn write_statistics(mut file: StatsFile) {
    let mut reader = StatsReader {
        counters: HostCounters::open(),
        statistics: Statistics::default(),
        exits: Arc::default(),
        zones: Vec::new(),
        fault_stalls: None,
        fill_times: None,
        table_bytes_before: Some(0),
    };
    let mut boot = BootStats::default();
    boot.end_phase("boot", Instant::now().elapsed(), reader.read().unwrap());
    for number in [1, 2] {
        file.write(&VmConfig::default(), number, "off", &boot).unwrap();
    }
}

/// Calls the C library as log messages, locks and kicks do.
fn use_c_library() {
    extern "C" fn ignore_signal(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    register_signal_handler(SIGRTMIN(), ignore_signal).unwrap();
    // SAFETY: the signal has a handler.
    assert_eq!(unsafe { libc::raise(SIGRTMIN()) }, 0);
    assert!(std::process::id() > 0);
    thread::yield_now();
    let _ = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
}

/// System calls that the components do not make on every host, each with the reason.
const DIRECT_CALLS: &[(i64, &str)] = &[
    (libc::SYS_clock_nanosleep, "the C library may sleep by nanosleep"),
    (libc::SYS_clone, "the C library may start threads by clone3"),
    (libc::SYS_clone3, "the C library may start threads by clone"),
    (libc::SYS_fstat, "the C library may use statx"),
    (libc::SYS_mbind, "the kernel may lack NUMA"),
    (libc::SYS_nanosleep, "the C library may sleep by clock_nanosleep"),
    (libc::SYS_newfstatat, "the C library may use statx"),
    (libc::SYS_mremap, "the C library may move memory"),
    (libc::SYS_perf_event_open, "tracepoints need root and tracefs"),
    (libc::SYS_pread64, "statistics of KVM need KVM"),
    (libc::SYS_readv, "only the C library's buffered reads have several parts"),
    (libc::SYS_readlinkat, "only a panic reads links"),
    (libc::SYS_restart_syscall, "only the kernel restarts calls"),
    (libc::SYS_rseq, "the C library may not use rseq"),
    (libc::SYS_mincore, "the host may have no huge pages"),
    (libc::SYS_tkill, "the C library may raise signals by tgkill"),
    (libc::SYS_unlinkat, "the C library may use unlink"),
    (libc::SYS_writev, "only log messages have several parts"),
];

/// Issues [`DIRECT_CALLS`] with invalid arguments, under the filter of the main thread.
fn issue_direct_calls() {
    for (number, reason) in DIRECT_CALLS {
        // SAFETY: the kernel refuses each call, because -1 is no file descriptor, address or flag.
        let result = unsafe { libc::syscall(*number, -1_i64, -1_i64, -1_i64, -1_i64, -1_i64) };
        assert!(result < 0, "{number}: {reason}");
    }
}
