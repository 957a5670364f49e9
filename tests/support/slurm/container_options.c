/* A SPANK plugin of the test suite. It is NOT pyxis and starts no container: it makes srun and sbatch take pyxis's
 * options, and writes down what slurmd received of them: <directory>/<job>.<step>, a line "--option=value" each.
 *
 * plugstack.conf: required <this file's .so> <directory>
 */

#include <slurm/spank.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

SPANK_PLUGIN(slipway_container_options, 1)

enum { IMAGE, MOUNTS, NAME, WORKDIR, MOUNT_HOME, NO_MOUNT_HOME, ENV, COUNT };

static char received[COUNT][16384];

static int receive(int option, const char *value, int remote);

static struct spank_option options[] = {
    {"container-image", "IMAGE", "[pyxis's option, without pyxis] image", 1, IMAGE, receive},
    {"container-mounts", "SRC:DST[,SRC:DST...]", "[pyxis's option, without pyxis] mounts", 1, MOUNTS, receive},
    {"container-name", "NAME", "[pyxis's option, without pyxis] name", 1, NAME, receive},
    {"container-workdir", "PATH", "[pyxis's option, without pyxis] working directory", 1, WORKDIR, receive},
    {"container-mount-home", NULL, "[pyxis's option, without pyxis]", 0, MOUNT_HOME, receive},
    {"no-container-mount-home", NULL, "[pyxis's option, without pyxis]", 0, NO_MOUNT_HOME, receive},
    {"container-env", "NAME[,NAME...]", "[pyxis's option, without pyxis] variables", 1, ENV, receive},
};

static int receive(int option, const char *value, int remote)
{
    (void)remote;
    int has_value = value && value[0];
    int length = snprintf(received[option], sizeof(received[option]), "--%s%s%s", options[option].name,
                          has_value ? "=" : "", has_value ? value : "");
    return length < (int)sizeof(received[option]) ? ESPANK_SUCCESS : ESPANK_BAD_ARG;
}

int slurm_spank_init(spank_t spank, int argc, char *argv[])
{
    (void)argc, (void)argv;
    for (int option = 0; option < COUNT; option++)
        if (spank_option_register(spank, &options[option]) != ESPANK_SUCCESS)
            return -1;
    return 0;
}

/* Called by slurmstepd, as the user, before the tasks of a step are started. */
int slurm_spank_user_init(spank_t spank, int argc, char *argv[])
{
    uint32_t job, step;
    char path[4096];
    int given = 0;
    for (int option = 0; option < COUNT; option++)
        given |= received[option][0];
    if (!given || argc != 1)
        return 0;
    if (spank_get_item(spank, S_JOB_ID, &job) || spank_get_item(spank, S_JOB_STEPID, &step))
        return -1;
    snprintf(path, sizeof(path), "%s/%u.%u", argv[0], job, step);
    FILE *file = fopen(path, "w");
    if (!file)
        return -1;
    for (int option = 0; option < COUNT; option++)
        if (received[option][0])
            fprintf(file, "%s\n", received[option]);
    return fclose(file);
}
