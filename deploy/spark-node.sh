#!/bin/bash
# What a container is: spark-node master | worker MASTER_URL | driver COMMAND...
# Starts as root to read the secret, writes it where only the user paceline can read it, and goes on as that user.
set -euo pipefail

secret_file=/run/secrets/spark_secret
conf=/run/spark/conf
host=$(hostname)

if [ ! -s "$secret_file" ]; then
    echo "spark-node: no secret in $secret_file: openssl rand -hex 32 > deploy/spark_secret" >&2
    exit 2
fi
install -d -o paceline -g paceline -m 0700 /run/spark "$conf"
(
    umask 077
    cat > "$conf/spark-defaults.conf" << CONF
spark.authenticate true
spark.authenticate.secret $(tr -d '[:space:]' < "$secret_file")
spark.network.crypto.enabled true
spark.network.crypto.saslFallback false
spark.master.rest.enabled false
spark.master.ui.decommission.allow.mode DENY
spark.ui.killEnabled false
spark.ui.enabled false
spark.driver.host $host
spark.executor.cores 1
spark.executor.memory ${SPARK_WORKER_MEMORY:-1g}
spark.executorEnv.OMP_NUM_THREADS 1
CONF
)
chown paceline:paceline "$conf/spark-defaults.conf"

SPARK_HOME=$(python -c "from paceline.spark.java import spark_home; print(spark_home())")
export SPARK_HOME SPARK_CONF_DIR=$conf HOME=/home/paceline
PYSPARK_PYTHON=$(command -v python)
export PYSPARK_PYTHON PYSPARK_DRIVER_PYTHON=$PYSPARK_PYTHON
as_user() { exec setpriv --reuid=paceline --regid=paceline --init-groups --no-new-privs "$@"; }

case ${1:-} in
    master)
        as_user "$SPARK_HOME/bin/spark-class" org.apache.spark.deploy.master.Master --host "$host" --port 7077 --webui-port 8080
        ;;
    worker)
        as_user "$SPARK_HOME/bin/spark-class" org.apache.spark.deploy.worker.Worker --host "$host" --webui-port 8081 \
            --cores 1 --memory "${SPARK_WORKER_MEMORY:-1g}" --work-dir /tmp/spark-work "${2:?which master?}"
        ;;
    driver)
        shift
        as_user "$@"
        ;;
    *)
        echo "spark-node: ${1:-nothing} is none of master, worker, driver" >&2
        exit 2
        ;;
esac
