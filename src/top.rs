// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The subcommand `granule top`: shows the counters of a VM while it runs, from its control socket.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    io::{self, IsTerminal as _, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use granule_types::{make_printable, record::EventCounts, units::Bytes};
use granule_vmm::{
    kvm::tracepoints::counted_since,
    stalls::{LOST, LOST_SIZES, buckets, causes},
};
use serde::{Deserialize, de::DeserializeOwned};

use super::{CommandOutcome, CommandResult, write_stdout};

/// Most bytes of an answer that are read: that of a VM with many zones has some kilobytes.
const MAX_ANSWER: u64 = 1 << 20;

/// Options of `granule top`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Control socket of the VM: the file of `granule run --api-socket`
    socket: PathBuf,
    /// Seconds between two readings
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    interval: u64,
    /// Number of readings [default: until the VM ends]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Show what stage 2 maps by leaves of each size; faults of the guest wait while the host reads it
    #[arg(long)]
    mapped: bool,
}

/// Answer to `GET /v1/state`.
#[derive(Debug, Deserialize)]
struct State {
    state: String,
    phase: String,
    vcpus: u32,
    memory_bytes: u64,
}

/// Answer to `GET /v1/counters`.
#[derive(Debug, Default, Deserialize)]
struct Counters {
    events: EventCounts,
    faults: EventCounts,
    exits: EventCounts,
    #[serde(default)]
    stalls: EventCounts,
    resident: Vec<BTreeMap<u64, u64>>,
    stage2_tables: Option<u64>,
    overhead: Option<u64>,
}

/// Answer to `GET /v1/memory`.
#[derive(Debug, Deserialize)]
struct Memory {
    zones: Vec<Zone>,
}

/// Bytes that leaves of each size map at stage 2, if the host exports the tables.
#[derive(Debug, Deserialize)]
struct Zone {
    mapped: Option<BTreeMap<u64, u64>>,
}

/// Runs `granule top`.
pub fn run(args: &Args) -> CommandResult {
    let clear = if io::stdout().is_terminal() { "\x1b[H\x1b[2J" } else { "" };
    let mut before: Option<(Instant, Counters)> = None;
    let mut readings = 0;
    loop {
        let (state, now, memory) = match read(args) {
            Ok(answers) => answers,
            // The VM has ended since the last reading.
            Err(error) if before.is_some() && has_ended(&error) => return Ok(CommandOutcome::Done),
            Err(error) => {
                let path = args.socket.display();
                let help = "start a VM with `granule run --api-socket`";
                let error = make_printable(&error.to_string());
                return Err(format!("{path}: no VM answers: {error}; {help}").into());
            }
        };
        let at = Instant::now();
        let last = before.as_ref().map(|(then, counters)| (at - *then, counters));
        let memory = memory.as_ref().map_or_else(String::new, mapped_text);
        let text = screen(&state, &now, last) + &memory;
        let screen = format!("{clear}{}", printable_lines(&text));
        if !write_stdout(&screen)? {
            return Ok(CommandOutcome::Done);
        }
        before = Some((at, now));
        readings += 1;
        if args.count == Some(readings) {
            return Ok(CommandOutcome::Done);
        }
        thread::sleep(Duration::from_secs(args.interval));
    }
}

/// Makes each line printable: a VMM that its guest has taken over could change the terminal otherwise.
fn printable_lines(text: &str) -> String {
    text.split('\n').map(make_printable).collect::<Vec<_>>().join("\n")
}

fn read(args: &Args) -> io::Result<(State, Counters, Option<Memory>)> {
    let socket = &args.socket;
    let memory = args.mapped.then(|| get(socket, "/v1/memory")).transpose()?;
    Ok((get(socket, "/v1/state")?, get(socket, "/v1/counters")?, memory))
}

fn has_ended(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, NotFound, UnexpectedEof};
    [BrokenPipe, ConnectionRefused, ConnectionReset, NotFound, UnexpectedEof]
        .contains(&error.kind())
}

/// Requests a path from a control socket.
fn get<T: DeserializeOwned>(socket: &Path, path: &str) -> io::Result<T> {
    let mut stream = UnixStream::connect(socket)?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.take(MAX_ANSWER).read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or(io::ErrorKind::UnexpectedEof)?;
    match head.split(' ').nth(1) {
        Some("200") => serde_json::from_str(body).map_err(io::Error::from),
        Some("503") => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Err(io::Error::other(format!("{path}: {body}"))),
    }
}

/// Returns the text of a reading, with rates since the `last` one and the time since then.
fn screen(state: &State, now: &Counters, last: Option<(Duration, &Counters)>) -> String {
    let State { state, phase, vcpus, memory_bytes } = state;
    let memory = Bytes(*memory_bytes);
    let mut text = format!("{state}, phase {phase}, {vcpus} vCPUs, {memory} of memory\n\n");
    // Writing to a string does not fail.
    let _ = writeln!(text, "{:<44} {:>14} {:>12}", "counter", "count", "per second");
    let none = Counters::default();
    let (elapsed, before) = last.map_or((None, &none), |(time, then)| (Some(time), then));
    for (group, now, before) in [
        ("fault", &now.faults, &before.faults),
        ("exit", &now.exits, &before.exits),
        ("event", &now.events, &before.events),
    ] {
        let since = counted_since(before, now);
        for (name, count) in now.iter().filter(|(_, count)| **count > 0) {
            let rate = elapsed.map_or_else(String::new, |time| {
                format!("{:.0}", since[name] as f64 / time.as_secs_f64())
            });
            let _ = writeln!(text, "{:<44} {count:>14} {rate:>12}", format!("{group} {name}"));
        }
    }
    let stalls = counted_since(&before.stalls, &now.stalls);
    for cause in causes(&stalls) {
        if let Some((mean, bound)) = stall(&stalls, cause) {
            let bound = bound.map_or("more".to_owned(), |bound| format!("{bound:?}"));
            let _ = writeln!(text, "stall {cause}: mean {mean:?}, 99 of 100 up to {bound}");
        }
    }
    for (samples, name) in [("stalls", LOST), ("sizes", LOST_SIZES)] {
        if let Some(lost) = now.stalls.get(name).filter(|lost| **lost > 0) {
            let _ = writeln!(text, "samples of {samples} that the host's kernel dropped: {lost}");
        }
    }
    for (zone, resident) in now.resident.iter().enumerate() {
        let _ = writeln!(text, "\nresident, zone {zone}: {}", bytes_by_size(resident));
    }
    for (name, bytes) in
        [("stage-2 tables", now.stage2_tables), ("beyond guest memory", now.overhead)]
    {
        if let Some(bytes) = bytes {
            let _ = writeln!(text, "{name}: {}", Bytes(bytes));
        }
    }
    text
}

/// Returns the lines of what stage 2 maps.
fn mapped_text(memory: &Memory) -> String {
    let line = |(zone, Zone { mapped }): (usize, &Zone)| {
        let mapped = mapped.as_ref().map_or_else(
            || "unknown: the host does not export the tables to this VM".to_owned(),
            bytes_by_size,
        );
        format!("mapped at stage 2, zone {zone}: {mapped}\n")
    };
    memory.zones.iter().enumerate().map(line).collect()
}

fn bytes_by_size(bytes: &BTreeMap<u64, u64>) -> String {
    let sizes = bytes.iter().map(|(size, bytes)| format!("{} in {}", Bytes(*bytes), Bytes(*size)));
    sizes.collect::<Vec<_>>().join(", ")
}

/// Returns the mean of the stalls of a cause, and the bound of the bucket below which 99 of 100 are, if
/// there is one. Returns `None` without a stall.
fn stall(stalls: &EventCounts, cause: &str) -> Option<(Duration, Option<Duration>)> {
    let value = |key| stalls.get(&format!("{cause}.{key}")).copied();
    let count = value("count").filter(|count| *count > 0)?;
    let mean = Duration::from_nanos(value("ns")? / count);
    let mut buckets = buckets(stalls, cause).into_iter();
    let most = buckets.find(|(_, up_to)| up_to * 100 >= count * 99);
    Some((mean, most.map(|(bound, _)| Duration::from_nanos(bound))))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    const STATE: &str =
        r#"{"state":"running","phase":"run","vcpus":2,"memory_bytes":268435456,"ipa_bits":33}"#;
    const COUNTERS: &str = r#"{"events":{"kvm_exit":100},"faults":{"translation.level3":0},
        "exits":{"mmio-reads":4},"gauges":{},"stalls":{"mmio.count":4,"mmio.le-1000":0,
        "mmio.le-4000":4,"mmio.ns":8000,"lost":5},"resident":[{"4096":8192,"2097152":4194304}],
        "stage2_tables":16384,"overhead":3145728}"#;

    #[test]
    fn a_reading_shows_counts_rates_and_stalls_since_the_last_one() {
        let state: State = serde_json::from_str(STATE).unwrap();
        let now: Counters = serde_json::from_str(COUNTERS).unwrap();
        let before =
            Counters { events: [("kvm_exit".to_owned(), 40)].into(), ..Counters::default() };

        let first = screen(&state, &now, None);
        let second = screen(&state, &now, Some((Duration::from_secs(2), &before)));

        assert!(first.starts_with("running, phase run, 2 vCPUs, 256M of memory\n"), "{first}");
        assert!(!first.contains("translation"), "{first}");
        for expected in [
            format!("event kvm_exit{:>45} {:>12}\n", 100, 30),
            format!("exit mmio-reads{:>44} {:>12}\n", 4, 2),
            "stall mmio: mean 2µs, 99 of 100 up to 4µs\n".to_owned(),
            "samples of stalls that the host's kernel dropped: 5\n".to_owned(),
            "resident, zone 0: 8K in 4K, 4M in 2M\n".to_owned(),
            "stage-2 tables: 16K\nbeyond guest memory: 3M\n".to_owned(),
        ] {
            assert!(second.contains(&expected), "{expected}: {second}");
        }
    }

    #[test]
    fn control_characters_are_not_sent_to_the_terminal() {
        assert_eq!(printable_lines("run\x1b[2J\u{9b}\nx"), "run?[2J?\nx");
    }

    #[test]
    fn mapped_bytes_are_shown_for_each_zone() {
        let memory = r#"{"zones":[{"start":0,"mapped":{"4096":8192,"2097152":2097152}},{"start":9}],
            "balloon":null}"#;

        let text = mapped_text(&serde_json::from_str(memory).unwrap());

        assert_eq!(
            text,
            "mapped at stage 2, zone 0: 8K in 4K, 2M in 2M\n\
             mapped at stage 2, zone 1: unknown: the host does not export the tables to this VM\n"
        );
    }

    #[test]
    fn answers_come_from_the_socket_until_the_vm_ends() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("api");
        let listener = UnixListener::bind(&socket).unwrap();
        let server = thread::spawn(move || {
            for body in [STATE, COUNTERS] {
                let (mut client, _) = listener.accept().unwrap();
                let mut request = [0; 64];
                let length = client.read(&mut request).unwrap();
                assert!(request[..length].starts_with(b"GET /v1/"));
                write!(client, "HTTP/1.1 200 OK\r\n\r\n{body}").unwrap();
            }
        });
        let args = |count| Args { socket: socket.clone(), interval: 1, count, mapped: false };

        assert_eq!(run(&args(None)).unwrap(), CommandOutcome::Done);

        server.join().unwrap();
        let error = run(&args(Some(1))).unwrap_err().to_string();
        assert!(error.contains("no VM answers") && error.contains("--api-socket"), "{error}");
    }
}
