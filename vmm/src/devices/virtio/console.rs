// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A console with one port (virtio 1.2, section 5.3): `hvc0` in the guest. Faster than the serial
//! port, as it moves many bytes with one exit, but there only once the guest has its drivers.

use std::{
    fmt,
    io::Write,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::atomic::Ordering,
};

use virtio_bindings::virtio_ids::VIRTIO_ID_CONSOLE;

use super::{ConfigSpace, DeviceError, Direction, Queues, RateLimitedLog, VirtioDevice};
use crate::devices::console_output::ConsoleOutput;

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;

/// Bytes moved at once.
const PIECE: usize = 4096;

/// Bytes of output in one request; Linux gives a page. The buffers of a request may overlap, so
/// without a limit a guest could have 4 GiB written for each.
const MOST: usize = 1 << 20;

/// The device.
pub struct Console {
    config: ConfigSpace,
    input: Option<OwnedFd>,
    output: Box<dyn Write + Send>,
    /// What is waited for before there is more output.
    outlet: Option<ConsoleOutput>,
    /// Whether there may be a buffer of the driver's to read into.
    room: bool,
    complaints: RateLimitedLog,
}

impl fmt::Debug for Console {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Console").finish_non_exhaustive()
    }
}

impl Console {
    /// A console that writes to `output` and reads from `input`, if there is one. What is read
    /// must not block once a poll has said that there is something.
    #[must_use]
    pub fn new(input: Option<OwnedFd>, output: Box<dyn Write + Send>) -> Self {
        // Columns, rows, number of ports, emergency write: none is offered, so all are 0.
        Self {
            config: ConfigSpace::new(vec![0; 12], 0..0),
            input,
            output,
            outlet: None,
            room: false,
            complaints: RateLimitedLog::default(),
        }
    }

    /// Has the guest wait where there is no room in this outlet, which its output goes to.
    #[must_use]
    pub fn with_backpressure(mut self, outlet: ConsoleOutput) -> Self {
        self.outlet = Some(outlet);
        self
    }
}

impl VirtioDevice for Console {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_CONSOLE
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &[64, 64]
    }

    fn config(&self) -> &ConfigSpace {
        &self.config
    }

    fn process_queue(&mut self, queue: usize, queues: &mut Queues) -> Result<(), DeviceError> {
        let Some(ring) = queues.get(queue) else {
            return Ok(());
        };
        if queue == RECEIVE {
            self.room = true;
            return Ok(());
        }
        debug_assert_eq!(queue, TRANSMIT);
        let stopping = ring.stopping();
        let gives_up = || stopping.load(Ordering::Relaxed);
        ring.drain(|memory, chain| {
            if chain.length(Direction::Readable) > MOST {
                return Err(DeviceError::Request("its output is larger than 1M"));
            }
            // A driver that resets the device forgets what it asked for.
            if let Some(outlet) = &self.outlet
                && !outlet.wait_for_space(gives_up)
            {
                return Ok(0);
            }
            let mut bytes = [0; PIECE];
            let mut done = 0;
            loop {
                let count = chain.copy_out(memory, done, &mut bytes);
                if count == 0 {
                    break;
                }
                if let Err(error) = self.output.write_all(&bytes[..count]) {
                    let message = format_args!("the guest's console output is lost: {error}");
                    self.complaints.warn(message);
                    break;
                }
                done += count;
            }
            if let Err(error) = self.output.flush() {
                log::debug!("console output: {error}");
            }
            Ok(0)
        })
    }

    fn backend_fd(&self) -> Option<BorrowedFd<'_>> {
        let input = self.input.as_ref().filter(|_| self.room);
        input.map(AsFd::as_fd)
    }

    fn process_backend(&mut self, queues: &mut Queues) -> Result<(), DeviceError> {
        let (Some(ring), Some(input)) = (queues.get(RECEIVE), &self.input) else {
            return Ok(());
        };
        let Some(chain) = ring.pop()? else {
            // Nothing is read until the driver says that there is room again.
            self.room = ring.listen()?;
            return Ok(());
        };
        let mut bytes = [0; PIECE];
        let room = chain.length(Direction::Writable).min(PIECE);
        let count = match rustix::io::read(input, &mut bytes[..room]) {
            Ok(count) => count,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {
                ring.undo_pop();
                return Ok(());
            }
            Err(error) => {
                let message = format_args!("the guest gets no more console input: {error}");
                self.complaints.warn(message);
                0
            }
        };
        if count == 0 && room > 0 {
            ring.undo_pop();
            self.input = None;
            return Ok(());
        }
        let written = chain.copy_in(ring.memory(), 0, &bytes[..count]);
        ring.finish(chain.head(), u32::try_from(written).unwrap_or(0))?;
        ring.announce()
    }

    fn reset(&mut self) {
        self.room = false;
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Read as _, time::Duration};

    use super::*;
    use crate::devices::virtio::testing::{Buffer, Driver, EVENT_IDX, memory};

    #[test]
    fn both_directions_pass() {
        let memory = memory();
        let (input, mut keyboard) = std::io::pipe().unwrap();
        let (mut screen, output) = std::io::pipe().unwrap();
        let console = Box::new(Console::new(Some(input.into()), Box::new(output)));
        let mut driver = Driver::start(&memory, console, EVENT_IDX);

        driver.ask(TRANSMIT, &[Buffer::Out(vec![b'x'; 5000])]);
        let mut shown = vec![0; 5000];
        screen.read_exact(&mut shown).unwrap();
        keyboard.write_all(b"typed").unwrap();
        let (answers, written) = driver.ask(RECEIVE, &[Buffer::In(100)]);

        assert_eq!(shown, [b'x'; 5000]);
        assert_eq!((&answers[0][..5], written), (&b"typed"[..], 5));
    }

    #[test]
    fn input_waits_for_room_and_its_end_is_no_error() {
        let memory = memory();
        let (input, mut keyboard) = std::io::pipe().unwrap();
        let console = Box::new(Console::new(Some(input.into()), Box::new(std::io::sink())));
        let mut driver = Driver::start(&memory, console, EVENT_IDX);

        keyboard.write_all(b"abcdef").unwrap();
        let first = driver.ask(RECEIVE, &[Buffer::In(4)]);
        let second = driver.ask(RECEIVE, &[Buffer::In(4)]);
        drop(keyboard);
        driver.put(RECEIVE, &[Buffer::In(4)]);
        driver.kick(RECEIVE);
        std::thread::sleep(Duration::from_millis(50));

        assert_eq!(first, (vec![b"abcd".to_vec()], 4));
        assert_eq!((&second.0[0][..2], second.1), (&b"ef"[..], 2));
        assert!(!driver.has_answer(RECEIVE));
        driver.ask(TRANSMIT, &[Buffer::Out(vec![1])]);
    }

    #[test]
    fn a_guest_waits_for_a_reader_that_stalls_and_can_reset_the_device_meanwhile() {
        let memory = memory();
        let (_screen, to) = std::io::pipe().unwrap();
        let outlet = ConsoleOutput::new(to, || Ok(())).unwrap();
        let console =
            Console::new(None, Box::new(outlet.clone())).with_backpressure(outlet.clone());
        let mut driver = Driver::start(&memory, Box::new(console), 0);
        let mut requests = 0;
        while outlet.wait_for_space(|| true) || !stays_full(&outlet) {
            driver.ask(TRANSMIT, &[Buffer::Out(vec![7; 60_000])]);
            requests += 1;
            assert!(requests < 100);
        }

        driver.put(TRANSMIT, &[Buffer::Out(vec![7; 60_000])]);
        driver.kick(TRANSMIT);
        std::thread::sleep(Duration::from_millis(200));
        let waits = !driver.has_answer(TRANSMIT);
        driver.set(0x70, 0);

        assert!(waits);
        assert_eq!(driver.get(0x70), 0);
    }

    /// Whether nothing is written any more.
    fn stays_full(outlet: &ConsoleOutput) -> bool {
        let until = std::time::Instant::now() + Duration::from_millis(200);
        !outlet.wait_for_space(|| std::time::Instant::now() > until)
    }

    #[test]
    fn output_that_cannot_be_written_stops_nothing() {
        let memory = memory();
        let (screen, output) = std::io::pipe().unwrap();
        drop(screen);
        let console = Box::new(Console::new(None, Box::new(output)));
        let mut driver = Driver::start(&memory, console, 0);

        driver.ask(TRANSMIT, &[Buffer::Out(vec![1])]);
        driver.ask(TRANSMIT, &[Buffer::Out(vec![1])]);

        assert_eq!(driver.get(0x70), 15);
    }
}
