/* A reader that costs little: threads open, read and close the files of a list, each the next one.
 *   reader THREADS BYTES < LIST
 * reads at most BYTES of each file (0: all of it), 1 MiB a call, and prints the seconds and the bytes that it read. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static char **paths;
static long count, next_path, total, most;

static void *work(void *unused)
{
	char *buffer = malloc(1 << 20);
	for (;;) {
		long i = __sync_fetch_and_add(&next_path, 1), done = 0, got;
		if (i >= count)
			return NULL;
		int fd = open(paths[i], O_RDONLY);
		do {
			long wanted = most && most - done < 1 << 20 ? most - done : 1 << 20;
			got = fd < 0 ? -1 : read(fd, buffer, wanted);
			if (got < 0) {
				perror(paths[i]);
				exit(1);
			}
			done += got;
		} while (got && done != most);
		close(fd);
		__sync_fetch_and_add(&total, done);
	}
}

int main(int argc, char **argv)
{
	pthread_t threads[256];
	struct timespec begun, ended;
	char *line = NULL;
	size_t room = 0;
	int readers = argc > 2 ? atoi(argv[1]) : 0;

	if (readers < 1 || readers > 256)
		return 2;
	most = atol(argv[2]);
	for (ssize_t n; (n = getline(&line, &room, stdin)) > 0; count++) {
		line[strcspn(line, "\n")] = 0;
		paths = realloc(paths, (count + 1) * sizeof *paths);
		paths[count] = strdup(line);
	}
	clock_gettime(CLOCK_MONOTONIC, &begun);
	for (int i = 0; i < readers; i++)
		pthread_create(&threads[i], NULL, work, NULL);
	for (int i = 0; i < readers; i++)
		pthread_join(threads[i], NULL);
	clock_gettime(CLOCK_MONOTONIC, &ended);
	printf("%.9f %ld\n", ended.tv_sec - begun.tv_sec + (ended.tv_nsec - begun.tv_nsec) / 1e9, total);
	return 0;
}
