// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Console with one port (virtio 1.2, section 5.3): `hvc0` in the guest. It transfers many bytes
//! per exit and is therefore faster than the serial port, but the guest must load its driver.

use std::{
    io::Write,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, atomic::Ordering},
};

use rustix::io::Errno;
use virtio_bindings::virtio_ids::VIRTIO_ID_CONSOLE;

use super::{
    ConfigSpace, DeviceError, DeviceProperties, Direction, Queue, Queues, RateLimitedLog,
    VirtioDevice,
};
use crate::devices::console_output::ConsoleOutput;

const RECEIVE_QUEUE: usize = 0;
const TRANSMIT_QUEUE: usize = 1;

/// Maximum number of bytes per read or write call.
const CHUNK_SIZE: usize = 4096;
/// Maximum output per request; Linux sends a page. The buffers of a request may overlap, so that
/// an unlimited request could write 4 GiB.
const MAX_OUTPUT_SIZE: usize = 1 << 20;

/// Virtio console.
#[allow(missing_debug_implementations, reason = "it holds any output")]
pub struct Console {
    input: Option<OwnedFd>,
    output: Box<dyn Write + Send>,
    /// Buffer of `output`; transmit requests wait while it is full.
    output_buffer: Option<ConsoleOutput>,
    /// Indicates that the receive queue may have an available buffer.
    has_rx_buffer: bool,
    log: RateLimitedLog,
}

impl Console {
    /// Creates a console that writes to `output` and reads from `input`, if given. A read of
    /// `input` must not block once a poll has reported it as readable. Transmit requests wait while
    /// `output_buffer`, to which `output` writes, has no space.
    pub fn new(
        input: Option<OwnedFd>,
        output: Box<dyn Write + Send>,
        output_buffer: Option<ConsoleOutput>,
    ) -> Self {
        let log = RateLimitedLog::default();
        Self { input, output, output_buffer, has_rx_buffer: false, log }
    }
}

impl VirtioDevice for Console {
    fn properties(&self) -> DeviceProperties {
        DeviceProperties {
            device_type: VIRTIO_ID_CONSOLE,
            features: 0,
            queue_sizes: &[64, 64],
            // Columns, rows, number of ports, emergency write: unused without their features.
            config: ConfigSpace::new(vec![0; 12], 0..0),
        }
    }

    fn process_queue(&mut self, index: usize, queue: &mut Queue) -> Result<(), DeviceError> {
        if index != TRANSMIT_QUEUE {
            self.has_rx_buffer = true;
            return Ok(());
        }
        let stop = Arc::clone(&queue.stop_flag);
        queue.serve_available(|chain| {
            if chain.length(Direction::Readable) > MAX_OUTPUT_SIZE {
                return Err(DeviceError::Request("its output is larger than 1M"));
            }
            if let Some(output) = &self.output_buffer
                && !output.wait_for_space(|| stop.load(Ordering::Relaxed))
            {
                return Err(DeviceError::Stopped);
            }
            let mut bytes = [0; CHUNK_SIZE];
            let mut offset = 0;
            while let count @ 1.. = chain.read(offset, &mut bytes) {
                if let Err(error) = self.output.write_all(&bytes[..count]) {
                    self.log.warn(format_args!("console output is lost: {error}"));
                    break;
                }
                offset += count;
            }
            if let Err(error) = self.output.flush() {
                log::debug!("console output: {error}");
            }
            Ok(0)
        })
    }

    fn backend_fds(&self) -> Vec<BorrowedFd<'_>> {
        let input = self.input.iter().filter(|_| self.has_rx_buffer);
        input.map(AsFd::as_fd).collect()
    }

    fn process_backend(&mut self, queues: &mut Queues) -> Result<(), DeviceError> {
        let (Some(queue), Some(input)) = (&mut queues[RECEIVE_QUEUE], &self.input) else {
            return Ok(());
        };
        let Some(chain) = queue.pop()? else {
            // The input is not read until the driver adds a buffer.
            self.has_rx_buffer = queue.enable_notification()?;
            return Ok(());
        };
        let mut bytes = [0; CHUNK_SIZE];
        let space = chain.length(Direction::Writable).min(CHUNK_SIZE);
        let count = match rustix::io::read(input, &mut bytes[..space]) {
            Ok(count) => count,
            Err(Errno::AGAIN | Errno::INTR) => {
                queue.undo_pop();
                return Ok(());
            }
            Err(error) => {
                self.log.warn(format_args!("console input ends: {error}"));
                0
            }
        };
        if count == 0 && space > 0 {
            queue.undo_pop();
            self.input = None;
            return Ok(());
        }
        let written = chain.write(0, &bytes[..count]);
        queue.complete(chain.head_index, written)
    }

    fn reset(&mut self) {
        self.has_rx_buffer = false;
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Read as _, time::Duration};

    use super::*;
    use crate::devices::virtio::testing::{Buffer, Driver, EVENT_IDX};

    #[test]
    fn output_and_input_are_transferred_until_the_input_ends() {
        let (input, mut keyboard) = std::io::pipe().unwrap();
        let (mut reader, writer) = std::io::pipe().unwrap();
        let console = Box::new(Console::new(Some(input.into()), Box::new(writer), None));
        let mut driver = Driver::start(console, EVENT_IDX);

        driver.request(TRANSMIT_QUEUE, &[Buffer::Out(vec![b'x'; 5000])]);
        let mut shown = vec![0; 5000];
        reader.read_exact(&mut shown).unwrap();
        keyboard.write_all(b"abcdef").unwrap();
        let first = driver.request(RECEIVE_QUEUE, &[Buffer::In(4)]);
        let second = driver.request(RECEIVE_QUEUE, &[Buffer::In(4)]);
        drop(keyboard);
        driver.add_request(RECEIVE_QUEUE, &[Buffer::In(4)]);
        driver.notify(RECEIVE_QUEUE);
        std::thread::sleep(Duration::from_millis(50));

        assert_eq!(shown, [b'x'; 5000]);
        assert_eq!(first, (vec![b"abcd".to_vec()], 4));
        assert_eq!((&second.0[0][..2], second.1), (&b"ef"[..], 2));
        assert!(!driver.has_used(RECEIVE_QUEUE));
        driver.request(TRANSMIT_QUEUE, &[Buffer::Out(vec![1])]);
    }

    #[test]
    fn a_reset_ends_the_wait_for_a_stalled_reader() {
        let (_reader, writer) = std::io::pipe().unwrap();
        let output = ConsoleOutput::new(writer, || Ok(())).unwrap();
        let console = Console::new(None, Box::new(output.clone()), Some(output));
        let mut driver = Driver::start(Box::new(console), 0);

        // The pipe and the output buffer hold fewer than 100 requests.
        let waits = (0..100).any(|_| {
            driver.add_request(TRANSMIT_QUEUE, &[Buffer::Out(vec![7; 60_000])]);
            driver.notify(TRANSMIT_QUEUE);
            std::thread::sleep(Duration::from_millis(200));
            !driver.has_used(TRANSMIT_QUEUE) || driver.wait_used(TRANSMIT_QUEUE) != 0
        });
        driver.write_register(0x70, 0);

        assert!(waits);
        assert_eq!(driver.read_register(0x70), 0);
    }

    #[test]
    fn failed_output_does_not_stop_the_device() {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let console = Box::new(Console::new(None, Box::new(writer), None));
        let mut driver = Driver::start(console, 0);

        driver.request(TRANSMIT_QUEUE, &[Buffer::Out(vec![1])]);
        driver.request(TRANSMIT_QUEUE, &[Buffer::Out(vec![1])]);

        assert_eq!(driver.read_register(0x70), 15);
    }
}
